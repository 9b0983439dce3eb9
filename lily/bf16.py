# SPDX-License-Identifier: Apache-2.0
"""bfloat16, which numpy does not have: its bits in uint16, from and to float32."""

from __future__ import annotations

from typing import Any

import numpy as np


def f32_to_bf16(x: Any) -> Any:
    """Bits of bfloat16, rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_to_f32(bits: Any) -> Any:
    """float32 values of bfloat16 bits; exact."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
