# SPDX-License-Identifier: Apache-2.0
"""Sizes in words."""

from __future__ import annotations


def gb(nbytes: float | None) -> str:
    """Gigabytes of 10^9 bytes; None is unknown."""
    return "unknown" if nbytes is None else f"{nbytes / 1e9:.2f} GB"
