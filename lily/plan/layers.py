# SPDX-License-Identifier: Apache-2.0
"""Steps that several forward passes share: embedding, norms, projections, the parts of a GDN layer.

Not handled: which of them a pass needs, and in which order (decode.py, prefill.py, sample.py).
"""

from __future__ import annotations

from typing import Any

from lily.plan.builder import Builder, groups
from lily.plan.tiles import Tile
from lily.plan.views import Values, View
from lily.plan.weights_map import AttentionWeights, Dense, GdnWeights, Matrix, width


def embed(b: Builder, x: View) -> None:
    """x [rows, H] = embeddings of ids.in."""
    table = b.weights.embed
    row = table.view.nbytes // table.n
    ids = b.fixed("ids.in").using(4 * b.rows)
    b.dispatch("embed", (b.rows,), ids=ids, table=table.view.using(row * b.rows), x=x, vocab=table.n, **table.constants)


# ---- one row
def gemv(
    b: Builder, kernel: str, w: Matrix, *, pair: bool = False, shape: tuple[int, int] | None = None, label: str = "",
    **given: Any,
) -> None:  # fmt: skip
    """A kernel that multiplies one row by ``w`` [n, k], or with ``pair`` by the two matrices that ``w`` stacks.

    ``shape``: (outputs, threads) of a group, else the policy's for n and k.
    """
    n = w.parts[0].rows if pair else w.n
    outputs, threads = shape or b.policy.gemv_shape(n, w.k, pair=pair)
    b.dispatch(
        kernel, (groups(n, outputs),), threads, label=label or w.name, w=w, n=n, k=w.k, rows_per_group=outputs,
        **w.constants, **given,
    )  # fmt: skip


def norm_projection(b: Builder, x: View, norm: Dense, stack: tuple[Matrix, ...], y: View) -> None:
    """y = W·rmsnorm(x), activations: one dispatch for each matrix of the stack, all on one level."""
    for w in stack:
        gemv(b, "gemv_norm", w, x=x, norm=norm, y=y.part(w.column * b.act_bytes, w.n * b.act_bytes))


def norm_projection_f32(b: Builder, x: View, norm: Dense, stack: tuple[Matrix, ...], y: View) -> None:
    """As ``norm_projection`` with float32 results."""
    for w in stack:
        gemv(b, "gemv_norm_f32", w, x=x, norm=norm, y=y.part(w.column * 4, w.n * 4))


# ---- many rows
def norm_rows(b: Builder, x: View, norm: Dense) -> View:
    """rmsnorm of every row: [rows, H]."""
    y = b.act("normed", b.rows, b.config.hidden_size)
    b.dispatch("rmsnorm", (b.rows,), x=x, norm=norm, y=y, k=b.config.hidden_size)
    return y


def gemm(
    b: Builder, kernel: str, w: Matrix, *, rows: int | None = None, pair: bool = False, label: str = "", **given: Any
) -> None:
    """A kernel that multiplies ``rows`` rows (default: all) by ``w``, or with ``pair`` by the two that it stacks."""
    n, rows = w.parts[0].rows if pair else w.n, rows or b.rows
    tile = Tile.dense(b.policy, rows, parts=2 if pair else 1)
    b.dispatch(
        kernel, tile.grid(n, rows), label=label or w.name, w=w, n=n, k=w.k, tile_m=tile.m, tile_n=tile.n,
        **w.constants, **given,
    )  # fmt: skip


def project(b: Builder, x: View, stack: tuple[Matrix, ...], y: View, pitch: int) -> None:
    """y [rows, pitch] = x · Wᵀ, each matrix of the stack into its own columns."""
    for w in stack:
        gemm(b, "gemm", w, x=x, y=y, pitch=pitch, column=w.column)


def project_f32(
    b: Builder, x: View, stack: tuple[Matrix, ...], y: View, pitch: int, *, first: int = 0, limit: int | None = None
) -> None:
    """As ``project`` with float32 results, of rows [first, first+limit) of ``x`` alone: y [limit, pitch]."""
    limit = limit or b.rows
    for w in stack:
        gemm(b, "gemm_f32", w, rows=limit, x=x, y=y, pitch=pitch, column=w.column, first=first, limit=limit)


# ---- one row or many
def gdn_mix(b: Builder, layer: int, w: GdnWeights, proj: View, y: View) -> None:
    """Convolution, recurrence and gated norm as three kernels.

    proj [rows, q | k | v | z | b | a] → y [rows, Hv·Dv], state.in → state.out.
    """
    c, p, m = b.config, b.policy, b.rows
    hk, hv, dk, dv = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    pitch = width(w.in_proj)
    o = b.act("scan", m, hv, dv)
    qkv: Values = {"q": b.act("q", m, hk, dk), "k": b.act("k", m, hk, dk), "v": b.act("v", m, hv, dv)}
    gates: Values = {"gate": b.f32("gate", m, hv), "beta": b.f32("beta", m, hv)}
    b.dispatch(
        "gdn_conv", (hk, groups(m, p.conv_rows)), p.gdn_conv_threads(hv // hk), proj=proj, pitch=pitch,
        conv_w=w.conv, a_log=w.a_log, dt_bias=w.dt_bias, **qkv, **gates, **b.conv_rows(layer),
    )  # fmt: skip
    if p.ablated("register-scan"):
        b.dispatch("gdn_scan_blocked", (hv, 1), **qkv, **gates, **b.recurrent(layer), o=o)
    else:
        b.dispatch("gdn_scan", (hv, groups(dv, p.scan_columns)), **qkv, **gates, **b.recurrent(layer), o=o)
    b.dispatch("gdn_gate", (m,), o=o, proj=proj, pitch=pitch, norm=w.head_norm, y=y)


def attention_prep(b: Builder, layer: int, w: AttentionWeights, proj: View, q: View) -> None:
    """Norm and RoPE of q and k, and the append of k and v to the cache.

    proj [rows, (q | gate) of each head | k | v] → q [rows, Hq, D].
    """
    b.dispatch(
        "attn_prep", (b.rows,), proj=proj, pitch=width(w.in_proj), q_norm=w.q_norm, k_norm=w.k_norm, q=q, **b.kv(layer)
    )


def choose_experts(b: Builder, logits: View, ids: View, weights: View) -> None:
    """logits [rows, E+1] → ids and weights, each [rows, A]."""
    b.dispatch("route_topk", (b.rows,), logits=logits, ids=ids, weights=weights)


def combine_experts(b: Builder, y: View, weights: View, logits: View, shared: View, x: View) -> None:
    """x [rows, H] += the weighted sum of y [rows·A, H] and the gated shared [rows, H]."""
    b.dispatch("moe_combine", (b.rows,), y=y, weights=weights, logits=logits, shared=shared, x=x)


def swiglu(b: Builder, gate: View, up: View, y: View, rows: int, n: int) -> None:
    """y = silu(gate)·up, all [rows, n]."""
    b.dispatch("swiglu", (rows,), gate=gate, up=up, y=y, rows=rows, n=n)
