# SPDX-License-Identifier: Apache-2.0
"""Decode without its fusions: what each fused kernel replaced, as kernels of their own (``Policy.off``).

For measuring what a mechanism is worth, and as a second opinion on its arithmetic.
"""

from __future__ import annotations

from lily.plan import prefill
from lily.plan.builder import Builder, groups
from lily.plan.views import View
from lily.plan.weights_map import AttentionWeights, Matrix, MoeWeights, align


def routed_experts(b: Builder, w: MoeWeights, x: View, logits: View, act: View, ids: View, weights: View) -> None:
    """``moe_gate_up`` as norm, selection, two projections and the activation."""
    c, p = b.config, b.policy
    n, a = c.moe_intermediate_size, c.experts_per_token
    normed = prefill.norm_rows(b, x, w.norm, "normed")
    b.dispatch(
        "route_topk", (1,), step=b.fixed("step.in"), logits=logits, ids=ids, weights=weights,
        params={"experts": c.num_experts, "active": a, "renorm": c.norm_topk_prob},
    )  # fmt: skip
    halves = b.act("expert_gate", a, n), b.act("expert_up", a, n)
    for y, first in zip(halves, (0, align(n, p.row_block)), strict=True):
        _expert_rows(b, w.gate_up, normed, ids, y, n, first, broadcast=True)
    b.dispatch("swiglu", (a,), gate=halves[0], up=halves[1], y=act, params={"n": n, "rows": a})


def combined_experts(
    b: Builder, w: MoeWeights, x: View, logits: View, act: View, ids: View, weights: View, shared: View
) -> None:
    """``moe_down`` as two projections and their weighted sum."""
    c, p = b.config, b.policy
    h, a = c.hidden_size, c.experts_per_token
    y, shared_out = b.act("expert_out", a, h), b.act("shared_out", h)
    _expert_rows(b, w.down, act, ids, y, h, 0, broadcast=False)
    b.dispatch(
        "gemv", (groups(h, p.gemv_rows),), p.gemv_threads, label="shared_down", x=shared, w=w.shared_down, y=shared_out,
        params={"n": h, "k": c.shared_intermediate_size, "rows_per_group": p.gemv_rows},
        constants=w.shared_down.constants,
    )  # fmt: skip
    b.dispatch(
        "moe_combine", (1,), step=b.fixed("step.in"), y=y, weights=weights, logits=logits, shared=shared_out, x=x,
        params={"hidden": h, "experts": c.num_experts, "active": a},
    )  # fmt: skip


def _expert_rows(b: Builder, w: Matrix, x: View, ids: View, y: View, n: int, first: int, *, broadcast: bool) -> None:
    """Rows [first, first+n) of each chosen expert's matrix."""
    a, p = b.config.experts_per_token, b.policy
    b.dispatch(
        "moe_gemv", (groups(n, p.moe_rows), a), p.gemv_threads, label=w.parts[1 if first else 0].module.split(".")[-1],
        x=x, ids=ids, w=w.view.using(a * w.expert_bytes * n // w.n), y=y,
        params={
            "n": n, "k": w.k, "first": first, "stride": w.n, "broadcast": broadcast, "rows_per_group": p.moe_rows,
        },
        constants=w.constants,
    )  # fmt: skip


def attention_pieces(
    b: Builder, layer: int, w: AttentionWeights, proj: View, part_o: View, part_ml: View, grid: tuple[int, int],
    piece: int, constants: dict[str, int],
) -> None:  # fmt: skip
    """``attn_decode`` as preparation with append, then the pieces."""
    c = b.config
    hq, hkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    q, step = b.act("q_attention", hq, d), b.fixed("step.in")
    k, v = b.kv(layer, "k"), b.kv(layer, "v")
    b.dispatch(
        "attn_prep", (1,), step=step, proj=proj, q_norm=w.q_norm, k_norm=w.k_norm, inv_freq=b.weights.inv_freq,
        q=q, k=k, v=v, params={"pitch": 2 * hq * d + 2 * hkv * d, "eps": c.rms_norm_eps},
        constants={"hq": hq, "hkv": hkv, "dim": d, "rot": c.rotary_dim},
    )  # fmt: skip
    shape = {name: constants[name] for name in ("hq", "hkv", "dim", "pack", "fixed")}
    b.dispatch(
        "attn_decode_prepared", grid, step=step, q=q, k=k, v=v, part_o=part_o, part_ml=part_ml,
        params={"piece": piece}, constants={**shape, "coalesced": not b.policy.off("coalesced-kv")},
    )  # fmt: skip
