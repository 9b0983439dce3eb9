# SPDX-License-Identifier: Apache-2.0
"""The Metal Shading Language as text: one flattened source string, and its translation to C++ and CUDA C++.

Pure Python, no compiler: what runs the translation (the emulator of the tests, the CUDA device) brings its own.
"""
