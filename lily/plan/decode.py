# SPDX-License-Identifier: Apache-2.0
"""The forward pass of one token (batch 1): six levels a GDN layer, seven an attention layer.

Read top to bottom.  Formulas are in the kernel table; thresholds in the policy.
"""

from __future__ import annotations

from lily.checkpoint.config import ModelConfig
from lily.plan import ablations, prefill
from lily.plan.builder import Builder, groups
from lily.plan.views import Plan, View
from lily.plan.weights_map import AttentionWeights, Dense, GdnWeights, Matrix, MoeWeights


def decode_plan(b: Builder) -> Plan:
    """One token: ids.in[0] at step.in → its last hidden vector in ``hidden``, state.out and the KV cache."""
    x = b.fixed("hidden")
    prefill.embed(b, x)
    for i, w in enumerate(b.weights.layers):
        b.layer(i)
        if isinstance(w, AttentionWeights):
            attention(b, i, w, x)
        else:
            gdn(b, i, w, x)
        moe(b, w.moe, x)
    return b.finish("decode")


def norm_projection(
    b: Builder, x: View, norm: Dense, segments: tuple[Matrix, ...], y: View, *, f32: bool = False
) -> None:
    """y = W·rmsnorm(x): one dispatch, or one per segment of differing quantisation, on the same level."""
    size = 4 if f32 else b.act_bytes
    for w in segments:
        rows, threads = b.policy.gemv_shape(w.n, w.k)
        b.dispatch(
            "gemv_norm_f32" if f32 else "gemv_norm", (groups(w.n, rows),), threads,
            label=w.parts[0].module.split(".")[-1], x=x, norm=norm, w=w, y=y.part(w.column * size, w.n * size),
            params={"n": w.n, "k": w.k, "eps": b.config.rms_norm_eps, "rows_per_group": rows},
            constants=w.constants,
        )  # fmt: skip


def gdn(b: Builder, layer: int, w: GdnWeights, x: View) -> None:
    c = b.config
    pitch = c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads
    proj, y = b.act("proj", pitch), b.act("mixed", c.value_dim)
    (conv_in, s_in), (conv_out, s_out) = b.state.views(layer, "in"), b.state.views(layer, "out")
    norm_projection(b, x, w.norm, w.in_proj, proj)
    if b.policy.off("gdn-fusion"):
        prefill.gdn_mix(b, layer, w, proj, y, pitch)
    else:
        b.dispatch(
            "gdn_step", (c.linear_num_value_heads,), step_threads(c), proj=proj, conv_w=w.conv, a_log=w.a_log,
            dt_bias=w.dt_bias, norm=w.head_norm, conv_in=conv_in, conv_out=conv_out, s_in=s_in, s_out=s_out, y=y,
            params={"pitch": pitch, "eps": c.rms_norm_eps}, constants=prefill.gdn_heads(c, taps=True),
        )  # fmt: skip
    rows, threads = b.policy.gemv_shape(c.hidden_size, c.value_dim)
    b.dispatch(
        "gemv_residual", (groups(c.hidden_size, rows),), threads, label="out_proj", y=y, w=w.out_proj, x=x,
        params={"n": c.hidden_size, "k": c.value_dim, "rows_per_group": rows},
        constants=w.out_proj.constants,
    )  # fmt: skip


def step_threads(c: ModelConfig) -> int:
    """Threads of gdn_step on a GPU: a simdgroup holds 32 by 32 elements of the state (gdn_place)."""
    return min(512, 32 * groups(c.linear_key_head_dim, 32) * groups(c.linear_value_head_dim, 32))


def attention(b: Builder, layer: int, w: AttentionWeights, x: View) -> None:
    c, p = b.config, b.policy
    hq, hkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    pitch = 2 * hq * d + 2 * hkv * d
    piece, fixed = p.piece(b.capacity, d, hq // hkv)
    pieces, used = groups(b.capacity, piece), groups(b.context, piece)
    proj, o = b.act("proj_attention", pitch), b.act("attended", hq * d)
    part_o = b.f32("part_o", pieces, hq, d).using(used * hq * d * 4)
    part_ml = b.f32("part_ml", pieces, hq, 2).using(used * hq * 8)
    norm_projection(b, x, w.norm, w.in_proj, proj)
    pack = 1 if p.off("gqa-packing") else min(p.pack, hq // hkv)
    heads = {"hq": hq, "hkv": hkv, "dim": d, "rot": c.rotary_dim, "pack": pack, "fixed": fixed}
    if p.off("attention-fusion") or p.off("coalesced-kv"):
        ablations.attention_pieces(b, layer, w, proj, part_o, part_ml, (pieces, hkv), piece, heads)
    else:
        b.dispatch(
            "attn_decode", (pieces, hkv), step=b.fixed("step.in"), proj=proj, q_norm=w.q_norm, k_norm=w.k_norm,
            inv_freq=b.weights.inv_freq, k=b.kv(layer, "k"), v=b.kv(layer, "v"), part_o=part_o, part_ml=part_ml,
            params={"pitch": pitch, "eps": c.rms_norm_eps, "piece": piece}, constants=heads,
        )  # fmt: skip
    b.dispatch(
        "attn_combine", (hq,), min(1024, 4 * d), step=b.fixed("step.in"), part_o=part_o, part_ml=part_ml, o=o,
        params={"piece": piece}, constants={"hq": hq, "dim": d},
    )  # fmt: skip
    rows, threads = p.gemv_shape(c.hidden_size, hq * d)
    b.dispatch(
        "gemv_gated_residual", (groups(c.hidden_size, rows),), threads, label="o_proj",
        o=o, proj=proj, w=w.out_proj, x=x,
        params={"n": c.hidden_size, "k": hq * d, "dim": d, "rows_per_group": rows},
        constants=w.out_proj.constants,
    )  # fmt: skip


def moe(b: Builder, w: MoeWeights, x: View) -> None:
    c, p = b.config, b.policy
    h, n, ns, e, a = (
        c.hidden_size, c.moe_intermediate_size, c.shared_intermediate_size, c.num_experts, c.experts_per_token
    )  # fmt: skip
    logits, shared = b.f32("router", e + 1), b.act("shared", ns)
    act, ids, weights = b.act("expert_act", a, n), b.i32("ids", a), b.f32("weights", a)
    norm_projection(b, x, w.norm, w.router, logits, f32=True)
    rows, threads = p.gemv_shape(ns, h, pair=True)
    b.dispatch(
        "gemv_norm_swiglu", (groups(ns, rows),), threads, label="shared_gate_up",
        x=x, norm=w.norm, w=w.shared_gate_up, y=shared,
        params={"n": ns, "k": h, "eps": c.rms_norm_eps, "rows_per_group": rows},
        constants=w.shared_gate_up.constants,
    )  # fmt: skip
    if p.off("expert-fusion"):
        ablations.routed_experts(b, w, x, logits, act, ids, weights)
    else:
        rows, threads = p.gemv_shape(n, h, pair=True, matrices=a)
        b.dispatch(
            "moe_gate_up", (groups(n, rows), a), threads,
            x=x, norm=w.norm, logits=logits, w=w.gate_up.view.using(a * w.gate_up.expert_bytes),
            act=act, ids=ids, weights=weights,
            params={
                "n": n, "k": h, "eps": c.rms_norm_eps, "experts": e, "active": a, "renorm": c.norm_topk_prob,
                "rows_per_group": rows,
            },
            constants=w.gate_up.constants,
        )  # fmt: skip
    if p.off("combine-fusion"):
        ablations.combined_experts(b, w, x, logits, act, ids, weights, shared)
        return
    down, shared_down = w.down.constants, w.shared_down.constants
    rows, threads = p.moe_down_shape(a)
    b.dispatch(
        "moe_down", (groups(h, rows),), threads,
        act=act, ids=ids, weights=weights, logits=logits, w=w.down.view.using(a * w.down.expert_bytes),
        shared=shared, w_shared=w.shared_down, x=x,
        params={"n": h, "k": n, "ks": ns, "experts": e, "active": a, "rows_per_group": rows},
        constants={**down, "shared_bits": shared_down["bits"], "shared_group": shared_down["group"]},
    )  # fmt: skip
