# SPDX-License-Identifier: Apache-2.0
"""Calls of the routing kernels, and references for them: what the tests of CPU kernels and of shaders share.

Expected values: float64 softmax with a stable sort, and a grouping written with numpy.
Not handled: running the calls, on which the tests differ.
"""

from __future__ import annotations

import numpy as np
from kernel_calls import Array, Call
from kernel_harness import fill, step


def topk_call(logits: Array, active: int, renorm: bool = True, rows: int | None = None) -> Call:
    m, experts = logits.shape[0], logits.shape[1] - 1
    args = {
        "step": step(0, m if rows is None else rows), "logits": logits, "ids": fill((m, active), np.int32),
        "weights": fill((m, active)),
    }  # fmt: skip
    return Call("route_topk", args, {"experts": experts, "active": active, "renorm": int(renorm)}, grid=(m,))


def expected(logits: Array, active: int, renorm: bool) -> tuple[Array, Array]:
    x = logits[:, :-1].astype(float)
    e = np.exp(x - x.max(-1, keepdims=True))
    ids = np.argsort(-x, -1, kind="stable")[:, :active]
    chosen = np.take_along_axis(e, ids, -1)
    return ids, chosen / (chosen if renorm else e).sum(-1, keepdims=True)


def random_logits(rows: int, experts: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 1.5, (rows, experts + 1)).astype(np.float32)


def group_call(
    ids: Array, experts: int, tile: int, spare: int = 3, rows: int | None = None, threads: int = 1024
) -> Call:
    """``spare``: blocks of the map beyond what any routing can need."""
    m, active = ids.shape
    blocks = -(-m * active // tile) + min(experts, m * active) + spare
    args = {
        "step": step(0, m if rows is None else rows), "ids": ids, "offsets": fill(experts + 1, np.int32),
        "order": fill(m * active, np.int32), "blocks": fill((blocks, 2), np.int32),
    }  # fmt: skip
    params = {"experts": experts, "active": active, "tile_m": tile, "max_blocks": blocks}
    return Call("route_group", args, params, threads=(threads,))


def check_grouping(out: dict[str, Array], ids: Array, experts: int, tile: int) -> None:
    flat = ids.reshape(-1)
    n = len(flat)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])
    np.testing.assert_array_equal(out["offsets"], offsets)
    np.testing.assert_array_equal(out["order"][:n], np.argsort(flat, kind="stable"))
    want = [(e, at) for e in range(experts) for at in range(offsets[e], offsets[e + 1], tile)]
    want += [(-1, 0)] * (len(out["blocks"]) - len(want))
    np.testing.assert_array_equal(out["blocks"], want)
