# SPDX-License-Identifier: Apache-2.0
"""The Metal Shading Language as text: one flattened source, and its translation to C++ and CUDA C++ (README.md)."""
