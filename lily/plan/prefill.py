# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a prompt chunk: up to ``Builder.rows`` rows, of which Step.rows are real.

Read top to bottom.  Formulas are in the kernel table; thresholds in the policy.
"""

from __future__ import annotations

from typing import Any

from lily.checkpoint.config import ModelConfig
from lily.plan.builder import Builder, groups
from lily.plan.expanded import expanded_experts
from lily.plan.tiles import Tile
from lily.plan.views import Plan, View
from lily.plan.weights_map import AttentionWeights, Dense, GdnWeights, Matrix, MoeWeights


def prefill_plan(b: Builder, *, score_top: int | None = None) -> Plan:
    """A chunk: ids.in at step.in → state.out, the KV cache, and the last row in ``hidden``.

    With ``score_top`` every row's log-probability of ``targets`` and its ``score_top`` best ids follow
    (buffers ``score.logprobs``, ``score.ids``, ``score.values``, ``score.flags``).
    """
    x = b.act("x", b.rows, b.config.hidden_size)
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
    b.dispatch(
        "last_row", (1,), step=b.fixed("step.in"), x=x, y=b.fixed("hidden"),
        params={"hidden": b.config.hidden_size},
    )  # fmt: skip
    return b.finish(f"prefill-{b.rows}")


def embed(b: Builder, x: View) -> None:
    """Rows of ``x`` = embeddings of ids.in."""
    table = b.weights.embed
    row = table.view.nbytes // table.n
    b.dispatch(
        "embed", (b.rows,), step=b.fixed("step.in"), ids=b.fixed("ids.in").using(4 * b.rows),
        table=table.view.using(row * b.rows), x=x,
        params={"hidden": b.config.hidden_size, "vocab": table.n}, constants=table.constants,
    )  # fmt: skip


def norm_rows(b: Builder, x: View, norm: Dense, name: str) -> View:
    """rmsnorm of every row."""
    h = b.act(name, b.rows, b.config.hidden_size)
    b.dispatch(
        "rmsnorm", (b.rows,), step=b.fixed("step.in"), x=x, norm=norm, y=h,
        params={"k": b.config.hidden_size, "eps": b.config.rms_norm_eps},
    )  # fmt: skip
    return h


def project(b: Builder, x: View, segments: tuple[Matrix, ...], y: View, pitch: int) -> None:
    """Rows of ``y`` = stacked projections of rows of ``x``."""
    tile = Tile.dense(b.policy, b.rows)
    for w in segments:
        b.dispatch(
            "gemm", tile.grid(w.n, b.rows), label=w.parts[0].module.split(".")[-1],
            step=b.fixed("step.in"), x=x, w=w, y=y,
            params={"n": w.n, "k": w.k, "pitch": pitch, "column": w.column, "tile_n": tile.n},
            constants=tile.constants(w),
        )  # fmt: skip


def project_f32(
    b: Builder, x: View, w: Matrix, y: View, pitch: int, *, first: int = 0, limit: int | None = None
) -> None:
    """As ``project`` with float32 results, for rows [first, first+limit)."""
    limit = b.rows if limit is None else limit
    tile = Tile.dense(b.policy, limit)
    b.dispatch(
        "gemm_f32", tile.grid(w.n, limit), label=w.parts[0].module.split(".")[-1],
        step=b.fixed("step.in"), x=x, w=w, y=y,
        params={
            "n": w.n, "k": w.k, "pitch": pitch, "column": w.column, "first": first, "limit": limit, "tile_n": tile.n,
        },
        constants=tile.constants(w),
    )  # fmt: skip


def project_residual(b: Builder, y: View, w: Matrix, x: View) -> None:
    """Rows of ``x`` += W · rows of ``y``."""
    tile = Tile.dense(b.policy, b.rows)
    b.dispatch(
        "gemm_residual", tile.grid(w.n, b.rows), label=w.parts[0].module.split(".")[-1],
        step=b.fixed("step.in"), y=y, w=w, x=x, params={"n": w.n, "k": w.k, "tile_n": tile.n},
        constants=tile.constants(w),
    )  # fmt: skip


def gdn(b: Builder, layer: int, w: GdnWeights, x: View) -> None:
    c = b.config
    pitch = c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads
    proj, y = b.act("proj", b.rows, pitch), b.act("mixed", b.rows, c.value_dim)
    project(b, norm_rows(b, x, w.norm, "normed"), w.in_proj, proj, pitch)
    gdn_mix(b, layer, w, proj, y, pitch)
    project_residual(b, y, w.out_proj, x)


def gdn_heads(c: ModelConfig, *, taps: bool = False) -> dict[str, int]:
    """The constants of the gdn kernels."""
    heads = {
        "hk": c.linear_num_key_heads, "hv": c.linear_num_value_heads, "dk": c.linear_key_head_dim,
        "dv": c.linear_value_head_dim,
    }  # fmt: skip
    return {**heads, "taps": c.conv_kernel} if taps else heads


def gdn_mix(b: Builder, layer: int, w: GdnWeights, proj: View, y: View, pitch: int) -> None:
    """Convolution, recurrence and gated norm as three kernels: rows of ``proj`` → rows of ``y``, state in → out."""
    c, m, step = b.config, b.rows, b.fixed("step.in")
    heads = gdn_heads(c)
    hk, hv, dk, dv = heads.values()
    scan, parts = "gdn_scan", groups(dv, b.policy.scan_columns)
    if b.policy.off("register-scan"):
        scan, parts = "gdn_scan_blocked", 1
    o = b.act("scan", m, hv, dv)
    q, k, v = b.act("q", m, hk, dk), b.act("k", m, hk, dk), b.act("v", m, hv, dv)
    gate, beta = b.f32("gate", m, hv), b.f32("beta", m, hv)
    (conv_in, s_in), (conv_out, s_out) = b.state.views(layer, "in"), b.state.views(layer, "out")
    b.dispatch(
        "gdn_conv", (hk, groups(m, b.policy.conv_rows)), min(256, 32 * (2 + hv // hk)), step=step, proj=proj,
        conv_w=w.conv, a_log=w.a_log, dt_bias=w.dt_bias,
        conv_in=conv_in, conv_out=conv_out, q=q, k=k, v=v, gate=gate, beta=beta,
        params={"pitch": pitch}, constants=gdn_heads(c, taps=True),
    )  # fmt: skip
    b.dispatch(
        scan, (hv, parts), step=step, q=q, k=k, v=v, gate=gate, beta=beta, s_in=s_in, s_out=s_out, o=o,
        constants=heads,
    )  # fmt: skip
    b.dispatch(
        "gdn_gate", (m,), step=step, o=o, proj=proj, norm=w.head_norm, y=y,
        params={"pitch": pitch, "eps": c.rms_norm_eps}, constants=heads,
    )  # fmt: skip


def attention(b: Builder, layer: int, w: AttentionWeights, x: View) -> None:
    c, p, m, step = b.config, b.policy, b.rows, b.fixed("step.in")
    hq, hkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    pitch = 2 * hq * d + 2 * hkv * d
    piece, _ = p.piece(b.capacity, d, hq // hkv)
    tile_rows = p.attention_rows(hq // hkv)
    proj, q, o = b.act("proj_attention", m, pitch), b.act("q_attention", m, hq, d), b.act("attended", m, hq * d)
    k, v = b.kv(layer, "k"), b.kv(layer, "v")
    project(b, norm_rows(b, x, w.norm, "normed"), w.in_proj, proj, pitch)
    b.dispatch(
        "attn_prep", (m,), step=step, proj=proj, q_norm=w.q_norm, k_norm=w.k_norm, inv_freq=b.weights.inv_freq,
        q=q, k=k, v=v, params={"pitch": pitch, "eps": c.rms_norm_eps},
        constants={"hq": hq, "hkv": hkv, "dim": d, "rot": c.rotary_dim},
    )  # fmt: skip
    b.dispatch(
        "attn_prefill", (groups(m, tile_rows), hkv), step=step, q=q, proj=proj, k=k, v=v, o=o,
        params={"pitch": pitch, "piece": piece, "tile_m": tile_rows}, constants={"hq": hq, "hkv": hkv, "dim": d},
    )  # fmt: skip
    project_residual(b, o, w.out_proj, x)


def moe(b: Builder, w: MoeWeights, x: View) -> None:
    c, p, m, step = b.config, b.policy, b.rows, b.fixed("step.in")
    h, ns, e, a = c.hidden_size, c.shared_intermediate_size, c.num_experts, c.experts_per_token
    tile_m = p.moe_tile(m, e, a)
    # Each expert that is hit may leave one tile partly filled.
    blocks = groups(m * a, tile_m) + min(e, m * a)
    normed = norm_rows(b, x, w.norm, "normed")
    logits, ids, weights = b.f32("router", m, e + 1), b.i32("ids", m, a), b.f32("weights", m, a)
    offsets, order, block_map = b.i32("offsets", e + 1), b.i32("order", m * a), b.i32("blocks", blocks, 2)
    shared_act, shared = b.act("shared_act", m, ns), b.act("shared", m, h)
    y = b.act("expert_out", m * a, h)
    for router in w.router:
        project_f32(b, normed, router, logits, e + 1)
    pair = Tile.dense(p, m, parts=2)
    b.dispatch(
        "gemm_swiglu", pair.grid(ns, m), label="shared_gate_up",
        step=step, x=normed, w=w.shared_gate_up, y=shared_act,
        params={"n": ns, "k": h, "tile_n": pair.n}, constants=pair.constants(w.shared_gate_up),
    )  # fmt: skip
    b.dispatch(
        "route_topk", (m,), step=step, logits=logits, ids=ids, weights=weights,
        params={"experts": e, "active": a, "renorm": c.norm_topk_prob},
    )  # fmt: skip
    project(b, shared_act, (w.shared_down,), shared, h)
    b.dispatch(
        "route_group", (1,), host=p.off("resident-routing"),
        step=step, ids=ids, offsets=offsets, order=order, blocks=block_map,
        params={"experts": e, "active": a, "tile_m": tile_m, "max_blocks": blocks},
    )  # fmt: skip
    routed: dict[str, Any] = {"step": step, "offsets": offsets, "order": order, "blocks": block_map}
    (expanded_experts if p.off("fused-dequantisation") else routed_experts)(b, w, normed, y, routed, tile_m, blocks)
    b.dispatch(
        "moe_combine", (m,), step=step, y=y, weights=weights, logits=logits, shared=shared, x=x,
        params={"hidden": h, "experts": e, "active": a},
    )  # fmt: skip


def routed_experts(
    b: Builder, w: MoeWeights, x: View, y: View, routed: dict[str, Any], tile_m: int, blocks: int
) -> None:
    """Rows of ``x`` through their experts, each by its own: y [rows*active, hidden].

    ``routed``: step, offsets, order and blocks of ``blocks`` tiles.
    """
    c = b.config
    h, n, e, a = c.hidden_size, c.moe_intermediate_size, c.num_experts, c.experts_per_token
    pair, single = Tile.of(b.policy, tile_m, parts=2), Tile.of(b.policy, tile_m)
    act, hit = b.act("expert_act", b.rows * a, n), min(e, b.rows * a)
    b.dispatch(
        "moe_gemm_gate_up", (groups(n, pair.n), blocks), x=x, y=act, **routed,
        w=w.gate_up.view.using(hit * w.gate_up.expert_bytes),
        params={"n": n, "k": h, "experts": e, "active": a, "tile_n": pair.n}, constants=pair.constants(w.gate_up),
    )  # fmt: skip
    b.dispatch(
        "moe_gemm_down", (groups(h, single.n), blocks), x=act, y=y, **routed,
        w=w.down.view.using(hit * w.down.expert_bytes),
        params={"n": h, "k": n, "experts": e, "active": a, "tile_n": single.n}, constants=single.constants(w.down),
    )  # fmt: skip


def score(b: Builder, x: View, top: int) -> None:
    """Log-probabilities of every row's target, ``Policy.score_rows`` rows of logits at a time."""
    v, limit = b.config.vocab_size, min(b.policy.score_rows, b.rows)
    normed = norm_rows(b, x, b.weights.norm, "normed")
    logits = b.f32("score_logits", limit, v)
    results: dict[str, Any] = {
        "target": View("score.targets", 0, b.rows * 4), "logprobs": View("score.logprobs", 0, b.rows * 4),
        "top_ids": View("score.ids", 0, max(b.rows * top, 4) * 4),
        "top_logprobs": View("score.values", 0, max(b.rows * top, 4) * 4), "flags": View("score.flags", 0, b.rows * 4),
    }  # fmt: skip
    for first in range(0, b.rows, limit):
        project_f32(b, normed, b.weights.head, logits, v, first=first, limit=limit)
        b.dispatch(
            "score_rows", (limit,), step=b.fixed("step.in"), request=b.fixed("request"), logits=logits, **results,
            params={"count": v, "top": top, "first": first, "limit": limit},
        )  # fmt: skip
