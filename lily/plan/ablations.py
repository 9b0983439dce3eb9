# SPDX-License-Identifier: Apache-2.0
"""Decode without its fusions: each fused kernel as the kernels that it replaced (``lily.policy.ABLATIONS``).

For measuring what a fusion is worth, and as a second opinion on its arithmetic.
Not handled: the ablations of prefill (expanded.py), and those that need no other kernels.
"""

from __future__ import annotations

from lily.plan.builder import Builder, groups
from lily.plan.layers import attention_prep, choose_experts, combine_experts, gemv, norm_rows, swiglu
from lily.plan.views import Values, View
from lily.plan.weights_map import AttentionWeights, Matrix, MoeWeights


def attention_splits(
    b: Builder, layer: int, w: AttentionWeights, proj: View, part_o: View, part_ml: View, splits: int,
    shape: Values,
) -> None:  # fmt: skip
    """``attn_decode`` as preparation with append, then the splits."""
    c = b.config
    q = b.act("q_attention", c.num_heads, c.head_dim)  # [Hq, D]
    attention_prep(b, layer, w, proj, q)
    b.dispatch(
        "attn_decode_prepared", (splits, c.num_kv_heads), q=q, **b.kv(layer), part_o=part_o, part_ml=part_ml, **shape,
        coalesced=not b.policy.ablated("coalesced-kv"),
    )  # fmt: skip


def routed_experts(b: Builder, w: MoeWeights, x: View, logits: View, act: View, ids: View, weights: View) -> None:
    """``moe_gate_up`` as norm, selection, two projections and the activation."""
    n, a = b.config.moe_intermediate_size, b.config.experts_per_token
    normed = norm_rows(b, x, w.norm)  # [1, H]
    choose_experts(b, logits, ids, weights)
    gate, up = b.act("expert_gate", a, n), b.act("expert_up", a, n)  # [A, I] each
    for part, y in enumerate((gate, up)):
        _chosen_rows(b, w.gate_up, part, normed, ids, y, broadcast=True)
    swiglu(b, gate, up, act, a, n)


def combined_experts(
    b: Builder, w: MoeWeights, x: View, logits: View, act: View, ids: View, weights: View, shared: View
) -> None:
    """``moe_down`` as two projections and their weighted sum."""
    h, a = b.config.hidden_size, b.config.experts_per_token
    y, shared_out = b.act("expert_out", a, h), b.act("shared_out", h)  # [A, H], [H]
    _chosen_rows(b, w.down, 0, act, ids, y, broadcast=False)
    gemv(b, "gemv", w.shared_down, label="shared_down", x=shared, y=shared_out)
    combine_experts(b, y, weights, logits, shared_out, x)


def _chosen_rows(b: Builder, w: Matrix, part: int, x: View, ids: View, y: View, *, broadcast: bool) -> None:
    """One part of each chosen expert's matrix: y [A, n] = W·x, with one x for all of them if ``broadcast``."""
    a, p, rows = b.config.experts_per_token, b.policy, w.parts[part]
    n = rows.rows
    b.dispatch(
        "moe_gemv", (groups(n, p.moe_rows), a), p.gemv_threads, label=rows.name, x=x, ids=ids,
        w=w.view.using(a * w.expert_bytes * n // w.n), y=y, n=n, k=w.k, first=rows.first, stride=w.n,
        broadcast=broadcast, rows_per_group=p.moe_rows, **w.constants,
    )  # fmt: skip
