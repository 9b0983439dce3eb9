# SPDX-License-Identifier: Apache-2.0
"""Prefill without dequantisation inside the grouped GEMM: the ablation ``fused-dequantisation``.

The experts' matrices are written to memory as bfloat16, one module after the other into the same place, and multiplied
from there.
"""

from __future__ import annotations

from lily.plan.builder import Builder, groups
from lily.plan.layers import swiglu
from lily.plan.tiles import Routed, Tile
from lily.plan.views import View
from lily.plan.weights_map import BYTES, Matrix, MoeWeights


def expanded_experts(b: Builder, w: MoeWeights, x: View, y: View, routed: Routed) -> None:
    """``prefill.routed_experts`` as expansions, products and the activation."""
    c = b.config
    n, assignments = c.moe_intermediate_size, b.rows * c.experts_per_token
    act = b.act("expert_act", assignments, n)  # [M·A, I]
    dense = b.scratch("expanded", max(_nbytes(w.gate_up), _nbytes(w.down)))
    gate, up = b.act("expert_gate", assignments, n), b.act("expert_up", assignments, n)  # [M·A, I] each

    _expand(b, w.gate_up, dense)
    for part, half in zip(w.gate_up.parts, (gate, up), strict=True):
        _multiply(b, w.gate_up, dense, part.first, n, x, half, routed, gather=True)
    swiglu(b, gate, up, act, assignments, n)
    _expand(b, w.down, dense)
    _multiply(b, w.down, dense, 0, c.hidden_size, act, y, routed, gather=False)


def _nbytes(w: Matrix, experts: int | None = None, rows: int | None = None) -> int:
    return (experts or w.experts) * (rows or w.n) * w.k * BYTES["bf16"]


def _expand(b: Builder, w: Matrix, dense: View) -> None:
    """All experts' rows of ``w``, padding included, to the start of ``dense``."""
    b.dispatch("expand", (w.experts * w.n,), w=w, y=dense.part(0, _nbytes(w)), n=w.n, k=w.k, **w.constants)


def _multiply(
    b: Builder, w: Matrix, dense: View, first: int, n: int, x: View, y: View, routed: Routed, *, gather: bool
) -> None:
    """Rows [first, first+n) of each expert's matrix."""
    tile = Tile.of(b.policy, routed.tile_m)
    hit = min(w.experts, b.rows * b.config.experts_per_token)
    b.dispatch(
        "moe_gemm_expanded", (groups(n, tile.n), routed.blocks), x=x, y=y, **routed.views,
        w=dense.part(0, _nbytes(w)).using(_nbytes(w, hit, n)), n=n, k=w.k, first=first, stride=w.n, gather=gather,
        tile_m=tile.m, tile_n=tile.n,
    )  # fmt: skip
