# SPDX-License-Identifier: Apache-2.0
"""Does a kernel compute the right thing on this device? Shared by the engine and ``lily doctor`` (README.md)."""
