# SPDX-License-Identifier: Apache-2.0
"""A device as the host sees it (README.md)."""
