# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a prompt chunk: up to ``Builder.rows`` rows, of which Step.rows are real.

Read top to bottom.  Formulas are in the kernel table, thresholds in the policy; M rows, sizes named as in the table.
"""

from __future__ import annotations

from lily.plan.builder import Builder, groups
from lily.plan.expanded import expanded_experts
from lily.plan.layers import (
    attention_prep,
    choose_experts,
    combine_experts,
    embed,
    gdn_mix,
    gemm,
    norm_rows,
    project,
    project_f32,
)
from lily.plan.tiles import Routed, Tile
from lily.plan.views import Plan, Values, View
from lily.plan.weights_map import AttentionWeights, GdnWeights, MoeWeights, width


def prefill_plan(b: Builder, *, score_top: int | None = None) -> Plan:
    """A chunk: ids.in at step.in → state.out, the KV cache, and the last row in ``hidden``.

    With ``score_top`` every row's log-probability of ``targets`` and its ``score_top`` best ids follow
    (buffers ``score.logprobs``, ``score.ids``, ``score.values``, ``score.flags``).
    """
    x = b.residual()  # [M, H], to which every layer adds
    embed(b, x)
    for i, w in enumerate(b.weights.layers):
        b.layer(i)
        if isinstance(w, AttentionWeights):
            attention(b, i, w, x)
        else:
            gdn(b, i, w, x)
        moe(b, w.moe, x)
    b.layer(None)
    if score_top is not None:
        score(b, x, score_top)
        return b.finish(f"score-{b.rows}")
    b.dispatch("last_row", (1,), x=x, y=b.fixed("hidden"))
    return b.finish(f"prefill-{b.rows}")


def gdn(b: Builder, layer: int, w: GdnWeights, x: View) -> None:
    """x += out_proj · mixer, the mixer with the layer's own state."""
    m, pitch = b.rows, width(w.in_proj)
    proj = b.act("proj", m, pitch)  # [M, q | k | v | z | b | a]
    y = b.act("mixed", m, b.config.value_dim)  # [M, Hv·Dv]

    project(b, norm_rows(b, x, w.norm), w.in_proj, proj, pitch)
    gdn_mix(b, layer, w, proj, y)
    gemm(b, "gemm_residual", w.out_proj, y=y, x=x)


def attention(b: Builder, layer: int, w: AttentionWeights, x: View) -> None:
    """x += o_proj · (softmax(q·kᵀ/√D)·v · sigmoid(gate))."""
    c, p, m = b.config, b.policy, b.rows
    hq, hkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    split, _ = p.split(b.kv_tokens, d, hq // hkv)
    tile_rows = p.attention_rows(hq // hkv)
    pitch = width(w.in_proj)
    proj = b.act("proj_attention", m, pitch)  # [M, (q [D] | gate [D]) of each of Hq heads | k [Hkv·D] | v [Hkv·D]]
    q = b.act("q_attention", m, hq, d)  # [M, Hq, D]
    o = b.act("attended", m, hq * d)  # [M, Hq·D]

    project(b, norm_rows(b, x, w.norm), w.in_proj, proj, pitch)
    attention_prep(b, layer, w, proj, q)
    b.dispatch(
        "attn_prefill", (groups(m, tile_rows), hkv), q=q, proj=proj, pitch=pitch, **b.kv(layer), o=o, split=split,
        tile_m=tile_rows,
    )  # fmt: skip
    gemm(b, "gemm_residual", w.out_proj, y=o, x=x)


def moe(b: Builder, w: MoeWeights, x: View) -> None:
    """x += the weighted sum of the chosen experts' and the shared expert's outputs."""
    c, p, m = b.config, b.policy, b.rows
    h, ns, e, a = c.hidden_size, c.shared_intermediate_size, c.num_experts, c.experts_per_token
    tile_m = p.moe_tile(m, e, a)
    # Each expert that is hit may leave one tile partly filled.
    blocks = groups(m * a, tile_m) + min(e, m * a)
    normed = norm_rows(b, x, w.norm)  # [M, H]
    logits = b.f32("router", m, e + 1)  # [M, E | the shared expert's gate]
    ids, weights = b.i32("ids", m, a), b.f32("weights", m, a)  # [M, A] each
    offsets = b.i32("offsets", e + 1)  # of each expert's first place among the M·A sorted ones
    order = b.i32("order", m * a)  # the assignment at each place
    block_map = b.i32("blocks", blocks, 2)  # (expert, first place) of each tile
    shared_act, shared = b.act("shared_act", m, ns), b.act("shared", m, h)  # [M, Is], [M, H]
    y = b.act("expert_out", m * a, h)  # [M·A, H]

    project_f32(b, normed, w.router, logits, e + 1)
    gemm(b, "gemm_swiglu", w.shared_gate_up, pair=True, label="shared_gate_up", x=normed, y=shared_act)
    choose_experts(b, logits, ids, weights)
    project(b, shared_act, (w.shared_down,), shared, h)
    b.dispatch(
        "route_group", (1,), host=p.ablated("resident-routing"), ids=ids, offsets=offsets, order=order,
        blocks=block_map, tile_m=tile_m, max_blocks=blocks,
    )  # fmt: skip
    routed = Routed(offsets, order, block_map, blocks, tile_m)
    if p.ablated("fused-dequantisation"):
        expanded_experts(b, w, normed, y, routed)
    else:
        routed_experts(b, w, normed, y, routed)
    combine_experts(b, y, weights, logits, shared, x)


def routed_experts(b: Builder, w: MoeWeights, x: View, y: View, routed: Routed) -> None:
    """Rows of x [M, H] through their experts: y [M·A, H], each row by its own expert."""
    c, p = b.config, b.policy
    h, n, assignments = c.hidden_size, c.moe_intermediate_size, b.rows * c.experts_per_token
    act = b.act("expert_act", assignments, n)  # [M·A, I], sorted by expert

    tile = Tile.of(p, routed.tile_m, parts=2)
    b.dispatch(
        "moe_gemm_gate_up", (groups(n, tile.n), routed.blocks), x=x, y=act, **routed.views,
        w=w.gate_up.used_by(assignments), n=n, k=h, tile_m=tile.m, tile_n=tile.n, **w.gate_up.constants,
    )  # fmt: skip
    tile = Tile.of(p, routed.tile_m)
    b.dispatch(
        "moe_gemm_down", (groups(h, tile.n), routed.blocks), x=act, y=y, **routed.views,
        w=w.down.used_by(assignments), n=h, k=n, tile_m=tile.m, tile_n=tile.n, **w.down.constants,
    )  # fmt: skip


def score(b: Builder, x: View, top: int) -> None:
    """Log-probabilities of every row's target, ``Policy.score_rows`` rows of logits at a time."""
    v, limit = b.config.vocab_size, min(b.policy.score_rows, b.rows)
    normed = norm_rows(b, x, b.weights.norm)  # [M, H]
    logits = b.f32("score_logits", limit, v)  # [limit, V]
    row, best = b.rows * 4, max(b.rows * top * 4, 16)  # bytes; no buffer is empty
    results: Values = {
        "target": View("score.targets", 0, row), "logprobs": View("score.logprobs", 0, row),
        "top_ids": View("score.ids", 0, best), "top_logprobs": View("score.values", 0, best),
        "flags": View("score.flags", 0, row),
    }  # fmt: skip

    for first in range(0, b.rows, limit):
        project_f32(b, normed, (b.weights.head,), logits, v, first=first, limit=limit)
        b.dispatch("score_rows", (limit,), logits=logits, **results, count=v, top=top, first=first, limit=limit)
