# SPDX-License-Identifier: Apache-2.0
"""The forward pass of one token (batch 1): six levels a GDN layer, seven an attention layer.

Read top to bottom.  Formulas are in the kernel table, thresholds in the policy; sizes are named as in the kernel table.
"""

from __future__ import annotations

from lily.plan import ablations
from lily.plan.builder import Builder, groups
from lily.plan.layers import embed, gdn_mix, gemv, norm_projection, norm_projection_f32
from lily.plan.views import Plan, Values, View
from lily.plan.weights_map import AttentionWeights, GdnWeights, MoeWeights, width


def decode_plan(b: Builder) -> Plan:
    """One token: ids.in[0] at step.in → its last hidden vector in ``hidden``, state.out and the KV cache."""
    x = b.fixed("hidden")  # [H], to which every layer adds
    embed(b, x)
    for i, w in enumerate(b.weights.layers):
        b.layer(i)
        if isinstance(w, AttentionWeights):
            attention(b, i, w, x)
        else:
            gdn(b, i, w, x)
        moe(b, w.moe, x)
    return b.finish("decode")


def gdn(b: Builder, layer: int, w: GdnWeights, x: View) -> None:
    """x += out_proj · mixer, the mixer with the layer's own state."""
    c, p = b.config, b.policy
    pitch = width(w.in_proj)
    proj = b.act("proj", pitch)  # q [Hk·Dk] | k [Hk·Dk] | v [Hv·Dv] | z [Hv·Dv] | b [Hv] | a [Hv]
    y = b.act("mixed", c.value_dim)  # [Hv·Dv]

    norm_projection(b, x, w.norm, w.in_proj, proj)
    if p.ablated("gdn-fusion"):
        gdn_mix(b, layer, w, proj, y)
    else:
        threads = p.gdn_step_threads(c.linear_key_head_dim, c.linear_value_head_dim)
        b.dispatch(
            "gdn_step", (c.linear_num_value_heads,), threads, proj=proj, pitch=pitch, conv_w=w.conv, a_log=w.a_log,
            dt_bias=w.dt_bias, norm=w.head_norm, **b.conv_rows(layer), **b.recurrent(layer), y=y,
        )  # fmt: skip
    gemv(b, "gemv_residual", w.out_proj, y=y, x=x)


def attention(b: Builder, layer: int, w: AttentionWeights, x: View) -> None:
    """x += o_proj · (softmax(q·kᵀ/√D)·v · sigmoid(gate)), the cache read in splits by groups of their own."""
    c, p = b.config, b.policy
    hq, hkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    split, fixed = p.split(b.kv_tokens, d, hq // hkv)
    splits, used = groups(b.kv_tokens, split), groups(b.context, split)
    pitch = width(w.in_proj)
    proj = b.act("proj_attention", pitch)  # (q [D] | gate [D]) of each of Hq heads | k [Hkv·D] | v [Hkv·D]
    o = b.act("attended", hq * d)  # [Hq, D]
    part_o = b.f32("part_o", splits, hq, d).using(used * hq * d * 4)  # [splits, Hq, D]
    part_ml = b.f32("part_ml", splits, hq, 2).using(used * hq * 2 * 4)  # [splits, Hq, (maximum, sum)]

    norm_projection(b, x, w.norm, w.in_proj, proj)
    shape: Values = {"split": split, "fixed": fixed, "pack": 1 if p.ablated("gqa-packing") else min(p.pack, hq // hkv)}
    if p.ablated("attention-fusion") or p.ablated("coalesced-kv"):
        ablations.attention_splits(b, layer, w, proj, part_o, part_ml, splits, shape)
    else:
        b.dispatch(
            "attn_decode", (splits, hkv), proj=proj, pitch=pitch, q_norm=w.q_norm, k_norm=w.k_norm, **b.kv(layer),
            part_o=part_o, part_ml=part_ml, **shape,
        )  # fmt: skip
    b.dispatch("attn_combine", (hq,), p.combine_threads(d), part_o=part_o, part_ml=part_ml, o=o, split=split)
    gemv(b, "gemv_gated_residual", w.out_proj, o=o, proj=proj, x=x)


def moe(b: Builder, w: MoeWeights, x: View) -> None:
    """x += the weighted sum of the chosen experts' and the shared expert's outputs."""
    c, p = b.config, b.policy
    h, n, ns = c.hidden_size, c.moe_intermediate_size, c.shared_intermediate_size
    e, a = c.num_experts, c.experts_per_token
    logits = b.f32("router", e + 1)  # [E | the shared expert's gate]
    shared = b.act("shared", ns)  # [Is]
    act = b.act("expert_act", a, n)  # [A, I]
    ids, weights = b.i32("ids", a), b.f32("weights", a)  # [A] each

    norm_projection_f32(b, x, w.norm, w.router, logits)
    gemv(b, "gemv_norm_swiglu", w.shared_gate_up, pair=True, label="shared_gate_up", x=x, norm=w.norm, y=shared)
    if p.ablated("expert-fusion"):
        ablations.routed_experts(b, w, x, logits, act, ids, weights)
    else:
        outputs, threads = p.gemv_shape(n, h, pair=True, matrices=a)
        b.dispatch(
            "moe_gate_up", (groups(n, outputs), a), threads, x=x, norm=w.norm, logits=logits, w=w.gate_up.used_by(a),
            act=act, ids=ids, weights=weights, n=n, k=h, rows_per_group=outputs, **w.gate_up.constants,
        )  # fmt: skip
    if p.ablated("combine-fusion"):
        ablations.combined_experts(b, w, x, logits, act, ids, weights, shared)
    else:
        outputs, threads = p.moe_down_shape(a)
        b.dispatch(
            "moe_down", (groups(h, outputs),), threads, act=act, ids=ids, weights=weights, logits=logits,
            w=w.down.used_by(a), shared=shared, w_shared=w.shared_down, x=x, n=h, k=n, ks=ns, rows_per_group=outputs,
            **w.down.constants, shared_bits=w.shared_down.spec.bits, shared_group=w.shared_down.spec.group_size,
        )  # fmt: skip
