# SPDX-License-Identifier: Apache-2.0
"""Plans run for one sequence on one device (README.md)."""
