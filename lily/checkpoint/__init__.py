# SPDX-License-Identifier: Apache-2.0
"""A model's folder, checked as a whole before any tensor is read (README.md)."""
