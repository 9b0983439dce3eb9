# SPDX-License-Identifier: Apache-2.0
"""One value, two devices: arguments of kernels as numbers, and as the bytes that each device holds them in.

Activations are float32 or bfloat16, quantised matrices are packed in the device's layout; everything else is alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lily.bf16 import bf16_to_f32, f32_to_bf16
from lily.device.weights import pack_matrices
from lily.kernels import Arg
from lily.plan.views import Dispatch, View
from lily.plan.weights_map import align
from lily.policy import Policy
from lily.structs import OUTPUT, REQUEST, STEP

Array = np.ndarray[Any, Any]

STORED: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32), "i32": np.dtype(np.int32), "u32": np.dtype(np.uint32), "u8": np.dtype(np.uint8),
    "bf16": np.dtype(np.uint16), "Step": STEP, "Request": REQUEST, "Output": OUTPUT,
}  # fmt: skip


@dataclass(frozen=True)
class Quantised:
    """``experts`` matrices of ``parts`` stacked parts: words [experts, parts, n, k·bits/32], scales and biases bf16."""

    words: Array
    scales: Array
    biases: Array
    bits: int
    group: int


Value = Array | Quantised


def stored(arg: Arg, policy: Policy) -> np.dtype[Any]:
    """The dtype in which a device holds a plain argument."""
    return STORED[policy.act if arg.dtype == "act" else arg.dtype]


def count(arg: Arg, view: View, policy: Policy) -> int:
    """Elements of a plain argument."""
    return view.nbytes // stored(arg, policy).itemsize


def encode(value: Value, arg: Arg, policy: Policy) -> Array:
    """The bytes of ``value`` on a device of ``policy``."""
    if isinstance(value, Quantised):
        return _pack(value, "rows" if arg.dtype == "qrows" else policy.layout, policy.row_block)
    dtype = stored(arg, policy)
    if arg.dtype in ("act", "bf16") and dtype == np.uint16:
        return np.asarray(f32_to_bf16(value)).view(np.uint8)
    return np.ascontiguousarray(value, dtype).reshape(-1).view(np.uint8)


def decode(raw: Array, arg: Arg, policy: Policy) -> Array:
    """What the bytes mean: float32 for act and bf16."""
    value = raw.view(stored(arg, policy))
    if arg.dtype in ("act", "bf16") and value.dtype == np.uint16:
        return np.asarray(bf16_to_f32(value))
    return value.copy()


def round_bf16(x: Array) -> Array:
    """The nearest bfloat16 numbers, as float32: what both devices can hold."""
    return np.asarray(bf16_to_f32(f32_to_bf16(x)))


def encoded(dispatch: Dispatch, inputs: dict[str, Value], policy: Policy) -> dict[str, Array]:
    """All arguments of ``dispatch``; ValueError if one does not have the size that its view has."""
    out = {}
    for arg, view in zip(dispatch.kernel.args, dispatch.views, strict=True):
        raw = encode(inputs[arg.name], arg, policy)
        if raw.nbytes != view.nbytes:
            raise ValueError(f"{dispatch.kernel.name}: {arg.name} has {raw.nbytes} bytes, its view {view.nbytes}")
        out[arg.name] = raw
    return out


def _pack(q: Quantised, layout: str, block: int) -> Array:
    _, parts, n, _ = q.words.shape
    # One matrix needs no rows between it and the next part; the layout itself pads at the end.
    rows = align(n, block) if parts > 1 else n
    sections = [_stacked(s, rows) for s in (q.words, q.scales, q.biases)]
    return pack_matrices(layout, sections[0], sections[1], sections[2], q.bits, q.group).reshape(-1)


def _stacked(section: Array, rows: int) -> Array:
    """[experts, parts, n, columns] → [experts, parts·rows, columns]."""
    experts, parts, n, columns = section.shape
    if rows != n:
        section = np.pad(section, ((0, 0), (0, 0), (0, rows - n), (0, 0)))
    return section.reshape(experts, parts * rows, columns)
