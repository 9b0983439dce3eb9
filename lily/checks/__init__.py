# SPDX-License-Identifier: Apache-2.0
"""Does a kernel compute the right thing on this device? What `lily doctor` and the opening of an engine share.

cases.py, inputs.py and values.py make a dispatch of every kernel with its inputs, as the plans have it; runs.py runs
it, check.py compares two devices; tensor_check.py decides whether tensor operations are used.
"""
