# SPDX-License-Identifier: Apache-2.0
"""Prefill attention shaders against float64: norm, RoPE, append, and causal attention over cache and chunk.

Not handled: decode attention (test_shaders_attention.py), production-size contexts (their block edges are the same at
every multiple of PREFILL_KEYS).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msl_harness import ORDERS, SLACK, Array, bf16, needs_emulator, needs_shaders, run, step
from test_shaders_gemm import float_operands

pytestmark = needs_shaders
EPS = 1e-6


# ---- preparation ----------------------------------------------------------------------------------------------------


def prepare(
    proj: Array, hq: int, hkv: int, dim: int, rot: int, position: int, rows: int, capacity: int, *, theta: float = 1e7,
    seed: int = 0, threads: int = 256, **options: Any,
) -> tuple[Any, dict[str, Array]]:  # fmt: skip
    rng = np.random.default_rng(seed)
    arrays = {
        "step": step(position, rows), "proj": proj, "q_norm": rng.normal(size=dim).astype(np.float32),
        "k_norm": rng.normal(size=dim).astype(np.float32),
        "inv_freq": (theta ** (-np.arange(0, rot, 2) / rot)).astype(np.float32),
        "q": bf16(np.zeros((len(proj), hq, dim))), "k": bf16(np.full((capacity, hkv, dim), 5)),
        "v": bf16(np.full((capacity, hkv, dim), 6)),
    }  # fmt: skip
    constants = {"hq": hq, "hkv": hkv, "dim": dim, "rot": rot}
    params = {"pitch": proj.shape[1], "eps": EPS}
    return run("attn_prep", arrays, params, constants, grid=(len(proj),), threads=(threads,), **options), arrays


def turned(x: Array, norm: Array, inv_freq: Array, position: int) -> Array:
    """RoPE(rmsnorm(x)) in float64, with the angle as float32 rounds it."""
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * norm
    half = len(inv_freq)
    angle = (np.float32(position) * inv_freq).astype(float)
    a, b = y[..., :half].copy(), y[..., half : 2 * half].copy()
    y[..., :half] = a * np.cos(angle) - b * np.sin(angle)
    y[..., half : 2 * half] = b * np.cos(angle) + a * np.sin(angle)
    return y


@pytest.mark.parametrize(
    ("hq", "hkv", "dim", "rot", "position"),
    [(4, 2, 64, 16, 0), (3, 1, 128, 128, 1000), (8, 1, 256, 64, 262_140), (2, 2, 32, 2, 77)],
)
def test_queries_and_keys_are_normed_and_turned_and_appended(
    hq: int, hkv: int, dim: int, rot: int, position: int
) -> None:
    rng = np.random.default_rng(dim)
    rows, pitch = 3, 2 * hq * dim + 2 * hkv * dim + 8
    proj = bf16(rng.normal(size=(rows + 1, pitch)))
    # A cache that ends with the last position: only its tail is kept here, so that 262,143 stays small.
    base = max(0, position - 2)
    shifted = position - base
    out, given = prepare(proj, hq, hkv, dim, rot, shifted, rows, shifted + rows) if base == 0 else (None, {})
    if out is None:
        out, given = prepare(proj, hq, hkv, dim, rot, position, rows, position + rows)
    x = proj.astype(float)
    for m in range(rows):
        at = position + m
        q = x[m, : 2 * hq * dim].reshape(hq, 2, dim)[:, 0]
        k, v = x[m, 2 * hq * dim : 2 * (hq + hkv) * dim].reshape(2, hkv, dim)
        want_q = turned(q, given["q_norm"], given["inv_freq"], at)
        want_k = turned(k, given["k_norm"], given["inv_freq"], at)
        np.testing.assert_allclose(out["q"][m].astype(float), want_q, rtol=2**-8, atol=2e-5)
        np.testing.assert_allclose(out["k"][at].astype(float), want_k, rtol=2**-8, atol=2e-5)
        np.testing.assert_array_equal(out["v"][at].astype(float), v)
    # Nothing else of the cache is touched; rows beyond the step are left alone.
    for name in ("k", "v"):
        assert np.isnan(out[name][:position].astype(float)).all()
    assert np.isnan(out["q"][rows:].astype(float)).all()


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_preparation_runs_clean_when_checked(order: str) -> None:
    proj = bf16(np.random.default_rng(0).normal(size=(4, 2 * 3 * 64 + 2 * 64)))
    out, _ = prepare(proj, 3, 1, 64, 16, 5, 3, 9, threads=96, checked=True, order=order)
    assert np.isfinite(out["q"][:3].astype(float)).all()


# ---- attention ------------------------------------------------------------------------------------------------------


class Attention:
    """Random queries over a random cache whose unused end is NaN."""

    def __init__(self, hq: int, hkv: int, dim: int, position: int, rows: int, *, spare: int = 3, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.hq, self.hkv, self.dim, self.position, self.rows = hq, hkv, dim, position, rows
        n = position + rows
        self.pitch = 2 * hq * dim + 2 * hkv * dim
        self.q = rng.normal(size=(rows + 1, hq, dim)) * 2
        self.proj = rng.normal(size=(rows + 1, self.pitch))
        self.k, self.v = (np.full((n + spare, hkv, dim), np.nan) for _ in range(2))
        self.k[:n], self.v[:n] = rng.normal(size=(2, n, hkv, dim))

    def run(self, act: str = "bf16", tile: int | None = None, **options: Any) -> Array:
        def cast(x: Array) -> Array:
            return bf16(x) if act == "bf16" else x.astype(np.float32)

        tile = tile or max(1, 32 * self.hkv // self.hq)
        self.q, self.proj = cast(self.q).astype(float), cast(self.proj).astype(float)
        self.k, self.v = bf16(self.k).astype(float), bf16(self.v).astype(float)
        arrays = {
            "step": step(self.position, self.rows), "q": cast(self.q), "proj": cast(self.proj), "k": bf16(self.k),
            "v": bf16(self.v), "o": cast(np.zeros((self.rows + 1, self.hq * self.dim))),
        }  # fmt: skip
        params = {"pitch": self.pitch, "split": 256, "tile_m": tile}
        constants = {"hq": self.hq, "hkv": self.hkv, "dim": self.dim}
        grid = (-(-(self.rows + 1) // tile), self.hkv)
        out = run("attn_prefill", arrays, params, constants, grid=grid, threads=(256,), act=act, **options)
        return out["o"].astype(float)

    def exact(self) -> Array:
        o = np.zeros((self.rows, self.hq, self.dim))
        for m in range(self.rows):
            n, gate = self.position + m + 1, self.proj[m, : 2 * self.hq * self.dim].reshape(self.hq, 2, self.dim)[:, 1]
            for h in range(self.hq):
                kv = h * self.hkv // self.hq
                s = self.k[:n, kv] @ self.q[m, h] / np.sqrt(self.dim)
                p = np.exp(s - s.max())
                o[m, h] = p @ self.v[:n, kv] / p.sum() / (1 + np.exp(-gate[h]))
        return o.reshape(self.rows, -1)

    def check(self, act: str = "bf16", *, tolerance: float = 0, **options: Any) -> None:
        got = self.run(act, **options)
        # bf16: probabilities are rounded for the matrix unit, their sum is not.
        tolerance = tolerance or (1.2e-2 if act == "bf16" else 2e-5 * SLACK)
        assert np.abs(got[: self.rows] - self.exact()).max() < tolerance
        assert np.isnan(got[self.rows :]).all()


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_causal_attention_of_every_head_size(dim: int, act: str) -> None:
    Attention(4, 2, dim, 37, 19).check(act)


@pytest.mark.parametrize("metal", [320, 400])
@pytest.mark.parametrize(("position", "rows"), [(0, 1), (0, 65), (62, 2), (63, 1), (64, 3), (40, 64), (30, 70)])
def test_head_size_256_on_both_matrix_paths(position: int, rows: int, metal: int) -> None:
    Attention(2, 1, 256, position, rows, spare=0, seed=position).check(metal=metal)


def test_tensor_tiles_are_shared_among_any_number_of_groups() -> None:
    case = Attention(4, 2, 256, 5, 70)
    for tile in (4, 128):
        assert np.abs(case.run(tile=tile, metal=400, order="random")[:70] - case.exact()).max() < 1.2e-2


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 62, 63, 64, 65, 126, 127, 128])
def test_contexts_at_the_edges_of_blocks(position: int) -> None:
    Attention(2, 1, 64, position, 2, spare=0, seed=position).check()


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_chunks_at_the_edges_of_tiles(rows: int) -> None:
    Attention(1, 1, 32, 3, rows, seed=rows).check()


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (8, 1), (16, 2), (10, 2), (32, 1)])
def test_query_heads_share_their_kv_head(hq: int, hkv: int) -> None:
    Attention(hq, hkv, 32, 20, 9, seed=hq).check()
    Attention(hq, hkv, 32, 20, 3, seed=hq).check("f32")


def test_a_tile_may_hold_more_rows_than_fit_at_once() -> None:
    case = Attention(8, 1, 32, 11, 21)
    got = case.run(tile=16)
    assert np.abs(got[:21] - case.exact()).max() < 1.2e-2


@pytest.mark.parametrize("order", ORDERS)
def test_attention_does_not_depend_on_the_order_of_threads(order: str) -> None:
    Attention(8, 1, 256, 70, 5).check(order=order, seed=9)


def test_a_long_context_in_reduced_form() -> None:
    Attention(1, 1, 8, 4094, 3).check("f32")


def test_context_of_32768_in_reduced_form() -> None:
    Attention(1, 1, 8, 32_766, 3).check("f32")


def test_float_operands() -> None:
    """What a GPU without bfloat arithmetic runs: half of the queries at once, nothing rounded on the way."""
    case = Attention(8, 1, 256, 61, 5, spare=0)
    got = case.run(source=float_operands("attention_prefill.metal", C_ROT=64), checked=True)
    # Only the result is rounded.
    assert np.abs(got[:5] - case.exact()).max() < 4e-3


def test_large_scores_do_not_overflow() -> None:
    case = Attention(2, 1, 64, 130, 2)
    case.q *= 100
    # Scores of hundreds: a GPU's order of the sums moves them by more than the last place of a probability.
    case.check("f32", tolerance=2e-5 if SLACK == 1 else 1e-3)


@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_attention_runs_clean_when_checked(act: str) -> None:
    Attention(4, 1, 64, 66, 9, spare=0).check(act, checked=True, order="random")
    Attention(8, 1, 256, 3, 3, spare=0).check(act, checked=True)


def test_tensor_attention_runs_clean_when_checked() -> None:
    Attention(2, 1, 256, 60, 9, spare=0).check(checked=True, order="random", metal=400)
