# SPDX-License-Identifier: Apache-2.0
"""The structures of device memory (``lily.kernels.STRUCTS``) as numpy sees them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lily.kernels import STRUCTS

_KINDS = {"i32": "<i4", "u32": "<u4", "f32": "<f4"}


def struct_dtype(name: str) -> np.dtype[Any]:
    """Record of the structure ``name``, field by field in its order, without padding."""
    fields: list[Any] = []
    for text in STRUCTS[name]:
        kind, field, count = re.fullmatch(r"(\w+) (\w+)(?:\[(\d+)\])?", text).groups()  # type: ignore[union-attr]
        fields.append((field, _KINDS[kind], (int(count),)) if count else (field, _KINDS[kind]))
    return np.dtype(fields)


STEP, REQUEST, OUTPUT = (struct_dtype(name) for name in ("Step", "Request", "Output"))
