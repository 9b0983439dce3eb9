# SPDX-License-Identifier: Apache-2.0
"""Runs the shaders of prefill attention, and holds them to float64.

test_shaders_attention_prefill.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msl_harness import SLACK, Array, bf16, run, step

EPS = 1e-6


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


def check_preparation(hq: int, hkv: int, dim: int, rot: int, position: int) -> None:
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
