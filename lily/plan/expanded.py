# SPDX-License-Identifier: Apache-2.0
"""Prefill without dequantisation inside the grouped GEMM: what it replaced (``Policy.off("fused-dequantisation")``).

The experts' matrices are written to memory as bfloat16, one module after the other into the same place, and multiplied
from there.
"""

from __future__ import annotations

from typing import Any

from lily.plan.builder import Builder, groups
from lily.plan.tiles import Tile
from lily.plan.views import View
from lily.plan.weights_map import Matrix, MoeWeights

BF16_BYTES = 2


def expanded_experts(
    b: Builder, w: MoeWeights, x: View, y: View, routed: dict[str, Any], tile_m: int, blocks: int
) -> None:
    """``prefill.routed_experts`` as expansions, products and the activation."""
    c = b.config
    n, hidden, assignments = c.moe_intermediate_size, c.hidden_size, b.rows * c.experts_per_token
    tile, act = Tile.of(b.policy, tile_m), b.act("expert_act", assignments, n)
    room = b.scratch("expanded", max(_bytes(w.gate_up), _bytes(w.down)))
    dense = _expand(b, w.gate_up, room)
    halves = b.act("expert_gate", assignments, n), b.act("expert_up", assignments, n)
    for part, half in zip(w.gate_up.parts, halves, strict=True):
        _multiply(b, w.gate_up, dense, part.first, n, x, half, routed, tile, blocks, gather=True)
    b.dispatch("swiglu", (assignments,), gate=halves[0], up=halves[1], y=act, params={"n": n, "rows": assignments})
    _multiply(b, w.down, _expand(b, w.down, room), 0, hidden, act, y, routed, tile, blocks, gather=False)


def _bytes(w: Matrix) -> int:
    return w.experts * w.n * w.k * BF16_BYTES


def _expand(b: Builder, w: Matrix, room: View) -> View:
    """All experts' rows of ``w``, padding included, at the start of ``room``."""
    dense = room.part(0, _bytes(w))
    b.dispatch(
        "expand", (w.experts * w.n,), w=w, y=dense, params={"experts": w.experts, "n": w.n, "k": w.k},
        constants=w.constants,
    )  # fmt: skip
    return dense


def _multiply(
    b: Builder, w: Matrix, dense: View, first: int, n: int, x: View, y: View, routed: dict[str, Any], tile: Tile,
    blocks: int, *, gather: bool,
) -> None:  # fmt: skip
    """Rows [first, first+n) of each expert's matrix."""
    a, experts = b.config.experts_per_token, w.experts
    hit = min(experts, b.rows * a)
    b.dispatch(
        "moe_gemm_expanded", (groups(n, tile.n), blocks), x=x, y=y, **routed,
        w=dense.using(hit * n * w.k * BF16_BYTES),
        params={
            "n": n, "k": w.k, "first": first, "stride": w.n, "experts": experts, "active": a, "gather": gather,
            "tile_n": tile.n,
        },
        constants={"tile_m": tile.m},
    )  # fmt: skip
