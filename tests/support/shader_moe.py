# SPDX-License-Identifier: Apache-2.0
"""Runs the expert shaders of prefill, and holds them to float64.

test_shaders_moe.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msl_harness import Array, Call, Run, bf16, run, run_many, step
from quantised import Quantised, qrows, random_quantised
from shader_gemm import BF16, close, rounded, silu, stacked, weights_of

from lily.policy import POLICIES


class Experts:
    """A routed layer: quantised experts, rows, and the assignments of rows to experts in their sorted order."""

    def __init__(
        self, ids: Array, experts: int, *, k: int, n: int, bits: int = 4, group: int = 32, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ids, self.experts, self.k, self.n, self.bits, self.group = ids, experts, k, n, bits, group
        self.rows, self.active = ids.shape
        self.gate, self.up, self.down = (
            [random_quantised(rng, n, k, bits, group) for _ in range(experts)] for _ in range(3)
        )
        self.x = bf16(rng.normal(size=(self.rows, k)))
        self.sorted_x = bf16(rng.normal(size=(self.rows * self.active, k)))

    def routed(self, tile: int, spare: int = 2) -> dict[str, Array]:
        """Arguments that route_group made, written independently."""
        flat = self.ids.reshape(-1)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=self.experts))]).astype(np.int32)
        blocks = [(e, at) for e in range(self.experts) for at in range(offsets[e], offsets[e + 1], tile)]
        return {
            "step": step(0, self.rows), "offsets": offsets, "order": np.argsort(flat, kind="stable").astype(np.int32),
            "blocks": np.array(blocks + [(-1, 0)] * spare, np.int32),
        }  # fmt: skip

    def call(self, kernel: str, tile: int, x: Array, w: Array, parts: int, columns: int = 0, **more: Any) -> Call:
        routed = self.routed(tile)
        columns = columns or POLICIES["metal"].tile_columns(tile, parts)
        y = bf16(np.zeros((self.rows * self.active, self.n)))
        params = {
            "n": self.n, "k": self.k, "experts": self.experts, "active": self.active, "tile_n": columns,
            **more,
        }  # fmt: skip
        constants = {"tile_m": tile, **({} if more else {"bits": self.bits, "group": self.group})}
        grid = (-(-self.n // columns), len(routed["blocks"]))
        return Call(kernel, {**routed, "x": x, "w": w, "y": y}, params, constants, grid, (128,))

    def gate_up(self, tile: int, **options: Any) -> Run:
        w = np.concatenate([qrows(stacked(g, u)) for g, u in zip(self.gate, self.up, strict=True)])
        return run_many([self.call("moe_gemm_gate_up", tile, self.x, w, 2)], **options)[0]

    def down_only(self, tile: int, **options: Any) -> Run:
        w = np.concatenate([qrows(d) for d in self.down])
        return run_many([self.call("moe_gemm_down", tile, self.sorted_x, w, 1)], **options)[0]

    def expected_gate_up(self) -> Array:
        order = np.argsort(self.ids.reshape(-1), kind="stable")
        out = np.zeros((len(order), self.n))
        for j, a in enumerate(order):
            e, x = self.ids.reshape(-1)[a], self.x[a // self.active].astype(float)
            out[j] = silu(weights_of(self.gate[e]) @ x) * (weights_of(self.up[e]) @ x)
        return out

    def expected_down(self, dense: list[Array] | None = None) -> Array:
        order = np.argsort(self.ids.reshape(-1), kind="stable")
        out = np.zeros((len(order), self.n))
        for j, a in enumerate(order):
            e = self.ids.reshape(-1)[a]
            w = dense[e] if dense else weights_of(self.down[e])
            out[a] = w @ self.sorted_x[j].astype(float)
        return out


def uneven_ids(rows: int, experts: int, active: int, seed: int = 0) -> Array:
    """Some experts crowded, some empty."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=experts) * 1.5
    return np.argsort(-(taste + rng.gumbel(size=(rows, experts))), -1)[:, :active].astype(np.int32)


def check_uneven(experts: int, active: int, tile: int, bits: int, metal: int) -> None:
    moe = Experts(uneven_ids(21, experts, active), experts, k=96, n=33, bits=bits, seed=tile)
    close(moe.gate_up(tile, metal=metal)["y"], moe.expected_gate_up(), BF16)
    close(moe.down_only(tile, metal=metal)["y"], moe.expected_down(), BF16)


def combine(
    rows: int, hidden: int, experts: int, active: int, *, extra: int = 1, **options: Any
) -> tuple[Array, Array]:
    """(result, expected) of all rows of the step."""
    rng = np.random.default_rng(hidden)
    m = rows + extra
    y, shared, x = (bf16(rng.normal(size=s)) for s in ((m * active, hidden), (m, hidden), (m, hidden)))
    weights = rng.random((m, active)).astype(np.float32)
    logits = rng.normal(size=(m, experts + 1)).astype(np.float32)
    arrays = {"step": step(0, rows), "y": y, "weights": weights, "logits": logits, "shared": shared, "x": x}
    params = {"hidden": hidden, "experts": experts, "active": active}
    got = run("moe_combine", arrays, params, grid=(m,), threads=(64,), **options)["x"].astype(float)
    gate = 1 / (1 + np.exp(-logits[:, experts:].astype(float)))
    total = (weights[..., None].astype(float) * y.astype(float).reshape(m, active, hidden)).sum(1)
    want = total + gate * shared.astype(float) + x.astype(float)
    np.testing.assert_array_equal(got[rows:], x[rows:].astype(float))
    return got[:rows], want[:rows]


def check_combine(rows: int, hidden: int, experts: int, active: int) -> None:
    close(*combine(rows, hidden, experts, active), BF16)


def expanded(matrices: list[Quantised], **options: Any) -> Array:
    n, k = matrices[0].values.shape
    arrays = {"w": np.concatenate([qrows(m) for m in matrices]), "y": bf16(np.zeros((len(matrices), n, k)))}
    params = {"experts": len(matrices), "n": n, "k": k}
    return run("expand", arrays, params, matrices[0].constants, grid=(len(matrices) * n,), threads=(32,), **options)[
        "y"
    ]


def check_expansion(bits: int, k: int, group: int) -> None:
    rng = np.random.default_rng(k)
    matrices = [random_quantised(rng, 5, k, bits, group) for _ in range(3)]
    want = np.stack([rounded(m.dense) for m in matrices])
    got = expanded(matrices, checked=k < 100, order="random").astype(float)
    # A product and a sum may be rounded together or apart before they are rounded to bf16.
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
    assert (got == want).mean() > 0.98


def check_expanded_products(tile: int, metal: int) -> None:
    moe = Experts(uneven_ids(21, 5, 2), 5, k=96, n=33)
    w = bf16(np.stack([d.dense for d in moe.down]))
    dense = list(w.astype(float))
    call = moe.call("moe_gemm_expanded", tile, moe.sorted_x, w, 1, gather=0, first=0, stride=33)
    close(run_many([call], order="random", metal=metal)[0]["y"], moe.expected_down(dense), BF16)
    call = moe.call("moe_gemm_expanded", tile, moe.x, w, 1, gather=1, first=0, stride=33)
    order = np.argsort(moe.ids.reshape(-1), kind="stable")
    want = [dense[moe.ids.reshape(-1)[a]] @ moe.x[a // 2].astype(float) for a in order]
    close(run_many([call], metal=metal)[0]["y"], np.array(want), BF16)
