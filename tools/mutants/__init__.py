# SPDX-License-Identifier: Apache-2.0
"""Plants faults in a copy of the checkout, one at a time, and runs the tests that should notice (README.md)."""
