# SPDX-License-Identifier: Apache-2.0
"""Sizes in words."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?)B?|B)?", re.ASCII)


def gb(nbytes: float | None) -> str:
    """Gigabytes of 10^9 bytes; None is unknown."""
    return "unknown" if nbytes is None else f"{nbytes / 1e9:.2f} GB"


def size(nbytes: int) -> str:
    """Gigabytes or megabytes, whichever is nearer; bytes and kilobytes below that."""
    if nbytes < 1e5:
        return f"{nbytes} bytes" if nbytes < 1e3 else f"{nbytes / 1e3:.1f} kB"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def parse_size(text: str) -> int | None:
    """Bytes of ``8000000000``, ``8GB`` (10^9) or ``8GiB`` (2^30), in any case; None for anything else."""
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None:
        return None
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))
