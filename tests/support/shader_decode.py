# SPDX-License-Identifier: Apache-2.0
"""Runs the shaders of decode's products, experts, norms and copies, and holds them to float64.

test_shaders_decode.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msl_harness import SLACK, Run, bf16, run, step
from quantised import Quantised, qrows, random_quantised

Array = Any
EPS = 1e-6
HALF_ULP = 2.0**-8  # of a bf16 number, relative


def close(got: Array, want: Array, magnitude: Array | float = 0) -> None:
    """``got`` is ``want`` rounded to its dtype, up to float32 sums over terms of the given total magnitude."""
    relative = 1e-6 * SLACK if got.dtype == np.float32 else HALF_ULP
    error = np.abs(got.astype(np.float64) - want)
    assert np.all(error <= relative * np.abs(want) + 2e-6 * SLACK * magnitude + 1e-30), float(np.max(error))


def rows(*matrices: Quantised) -> Array:
    """Bytes of the layout "rows", matrices one after the other."""
    return np.concatenate([qrows(m) for m in matrices])


def stacked(*parts: Quantised) -> Quantised:
    """One matrix of the rows of all."""
    values, scales, biases = (np.concatenate([getattr(m, f) for m in parts]) for f in ("values", "scales", "biases"))
    return Quantised(values, scales, biases, parts[0].bits, parts[0].group)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def normed(x: Array, w: Array) -> Array:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x) + EPS) * w


class Row:
    """A random row, its norm, and matrices for it."""

    def __init__(self, n: int, k: int, bits: int, group: int, *, act: str = "bf16") -> None:
        r = np.random.default_rng(1000 * n + k + bits + group)
        self.n, self.k, self.bits, self.group, self.act = n, k, bits, group, act
        self.w, self.up = (random_quantised(r, n, k, bits, group) for _ in range(2))
        self.x = self.cast(r.normal(size=k))
        self.norm = r.normal(1, 0.3, k).astype(np.float32)
        self.residual = self.cast(r.normal(size=n))
        self.proj = self.cast(r.normal(0, 3, 2 * k))

    def cast(self, values: Array) -> Array:
        return np.asarray(values, np.float32) if self.act == "f32" else bf16(values)

    def run(self, kernel: str, blocks: int = 1, threads: int = 64, **options: Any) -> Run:
        """``blocks`` of the rows that a simdgroup computes make a group: 8 outputs each, or 4 that need two rows."""
        per_group = blocks * (4 if "swiglu" in kernel else 8)
        out = np.zeros(self.n, np.float32) if kernel == "gemv_norm_f32" else self.cast(np.zeros(self.n))
        w = rows(stacked(self.w, self.up)) if "swiglu" in kernel else rows(self.w)
        arrays: dict[str, Array] = {"w": w}
        params: dict[str, float] = {"n": self.n, "k": self.k, "rows_per_group": per_group}
        if "norm" in kernel:
            arrays, params = {**arrays, "norm": self.norm}, {**params, "eps": EPS}
        if kernel == "gemv_gated_residual":
            arrays, params = {**arrays, "o": self.x, "proj": self.proj, "x": self.residual}, {**params, "dim": 64}
        elif kernel == "gemv_residual":
            arrays |= {"y": self.x, "x": self.residual}
        else:
            arrays |= {"x": self.x, "y": out}
        constants, grid = {"bits": self.bits, "group": self.group}, (-(-self.n // per_group),)
        return run(kernel, arrays, params, constants, grid=grid, threads=(threads,), act=self.act, **options)

    def want(self, kernel: str) -> tuple[Array, Array]:
        """(float64 result, magnitude of its terms)."""
        x = self.x.astype(np.float64)
        if "norm" in kernel:
            x = normed(self.x, self.norm)
        if kernel == "gemv_gated_residual":
            x = x * sigmoid(self.proj.astype(np.float64).reshape(-1, 2, 64)[:, 1].reshape(-1))
        y, magnitude = self.w.dense @ x, np.abs(self.w.dense) @ np.abs(x)
        if "swiglu" in kernel:
            u, size = self.up.dense @ x, np.abs(self.up.dense) @ np.abs(x)
            return silu(y) * u, magnitude * np.abs(u) + size * np.abs(silu(y))
        if "residual" in kernel:
            return self.residual.astype(np.float64) + y, magnitude
        return y, magnitude

    def check(self, kernel: str, **options: Any) -> Run:
        out = self.run(kernel, **options)
        close(out["x" if "residual" in kernel else "y"], *self.want(kernel))
        return out


GEMVS = ("gemv", "gemv_norm", "gemv_norm_f32", "gemv_norm_swiglu", "gemv_residual", "gemv_gated_residual")


class Moe:
    """A small mixture of experts with a shared expert of another quantisation."""

    def __init__(
        self, bits: int = 4, *, experts: int = 7, active: int = 3, h: int = 96, n: int = 32, k: int = 32,
        group: int = 32, ks: int = 64,
    ) -> None:  # fmt: skip
        """Gate and up are [n, h], down is [h, k], which need not fit: each kernel is tested by itself."""
        r = np.random.default_rng(bits * 1000 + experts)
        self.experts, self.active, self.h, self.n, self.k, self.ks = experts, active, h, n, k, ks
        self.gate, self.up = ([random_quantised(r, n, h, bits, group) for _ in range(experts)] for _ in range(2))
        self.down = [random_quantised(r, h, k, bits, group) for _ in range(experts)]
        self.shared_down = random_quantised(r, h, ks, 12 - bits, 64)
        self.w_gate_up = rows(*(stacked(g, u) for g, u in zip(self.gate, self.up, strict=True)))
        self.x, self.shared = bf16(r.normal(size=h)), bf16(r.normal(size=ks))
        self.norm = r.normal(1, 0.3, h).astype(np.float32)
        self.logits = r.normal(size=experts + 1).astype(np.float32)
        self.act = bf16(r.normal(size=(active, k)))
        self.constants = {"bits": bits, "group": group}

    def gate_up(self, per_group: int = 8, threads: int = 64, renorm: int = 1, **options: Any) -> Run:
        arrays = {
            "x": self.x, "norm": self.norm, "logits": self.logits, "w": self.w_gate_up,
            "act": bf16(np.zeros((self.active, self.n))), "ids": np.zeros(self.active, np.int32),
            "weights": np.zeros(self.active, np.float32),
        }  # fmt: skip
        params = {
            "n": self.n, "k": self.h, "eps": EPS, "experts": self.experts, "active": self.active, "renorm": renorm,
            "rows_per_group": per_group,
        }  # fmt: skip
        grid = (-(-self.n // per_group), self.active)
        return run("moe_gate_up", arrays, params, self.constants, grid=grid, threads=(threads,), **options)

    def chosen(self) -> Array:
        logits = np.where(np.isnan(self.logits[: self.experts]), -np.inf, self.logits[: self.experts])
        return np.argsort(-logits, kind="stable")[: self.active].astype(np.int32)

    def check_gate_up(self, **options: Any) -> Run:
        out, ids, p = self.gate_up(**options), self.chosen(), np.exp(self.logits[: self.experts].astype(np.float64))
        np.testing.assert_array_equal(out["ids"], ids)
        total = p[ids].sum() if options.get("renorm", 1) else p.sum()
        np.testing.assert_allclose(out["weights"], p[ids] / total, rtol=2e-6 * SLACK)
        h = normed(self.x, self.norm)
        for a, i in enumerate(ids):
            g, u = self.gate[i].dense @ h, self.up[i].dense @ h
            sizes = [np.abs(m[i].dense) @ np.abs(h) for m in (self.gate, self.up)]
            close(out["act"][a], silu(g) * u, sizes[0] * np.abs(u) + sizes[1] * np.abs(g))
        return out

    def run_down(self, ids: Array, weights: Array, per_group: int = 8, threads: int = 64, **options: Any) -> Run:
        arrays = {
            "act": self.act, "ids": ids, "weights": weights, "logits": self.logits, "w": rows(*self.down),
            "shared": self.shared, "w_shared": rows(self.shared_down), "x": self.x,
        }  # fmt: skip
        params = {
            "n": self.h, "k": self.k, "ks": self.ks, "experts": self.experts, "active": self.active,
            "rows_per_group": per_group,
        }  # fmt: skip
        constants = {**self.constants, "shared_bits": self.shared_down.bits, "shared_group": self.shared_down.group}
        grid = (-(-self.h // per_group),)
        return run("moe_down", arrays, params, constants, grid=grid, threads=(threads,), **options)

    def check_down(self, **options: Any) -> Run:
        ids = self.chosen()
        weights = np.linspace(0.4, 0.1, self.active).astype(np.float32)
        out, total = self.run_down(ids, weights, **options), self.x.astype(np.float64)
        size = np.zeros(self.h)
        pairs = [(self.down[i], w, a) for i, w, a in zip(ids, weights, self.act, strict=True)]
        for m, w, a in [*pairs, (self.shared_down, sigmoid(float(self.logits[self.experts])), self.shared)]:
            total = total + w * (m.dense @ a.astype(np.float64))
            size += w * (np.abs(m.dense) @ np.abs(a.astype(np.float64)))
        close(out["x"], total, size)
        return out


def check_single_matrices(checked: bool) -> None:
    moe, ids = Moe(), np.array([5, 0, 5], np.int32)
    for first, matrices, x, broadcast in (
        (0, moe.gate, moe.x, 1),
        (32, moe.up, bf16(np.ones((3, 96)) * [[1], [2], [3]]), 0),
    ):
        arrays = {"x": x, "ids": ids, "w": moe.w_gate_up, "y": bf16(np.zeros((3, 29)))}
        params = {"n": 29, "k": 96, "first": first, "stride": 64, "broadcast": broadcast, "rows_per_group": 8}
        out = run("moe_gemv", arrays, params, moe.constants, grid=(4, 3), threads=(64,), checked=checked)["y"]
        for e, i in enumerate(ids):
            dense, row = matrices[i].dense[:29], x.astype(np.float64).reshape(-1, 96)[0 if broadcast else e]
            close(out[e], dense @ row, np.abs(dense) @ np.abs(row))


def check_swiglu(n: int, order: str) -> None:
    gate = bf16(np.linspace(-110, 110, 3 * n).reshape(3, n))
    up = bf16(np.random.default_rng(1).normal(size=(3, n)))
    args = {"gate": gate, "up": up, "y": bf16(np.zeros((3, n)))}
    out = run("swiglu", args, {"n": n, "rows": 3}, grid=(4,), threads=(64,), order=order, checked=True)
    close(out["y"], silu(gate.astype(np.float64)) * up.astype(np.float64), 1e-25)


def check_embedding(bits: int, group: int, order: str) -> None:
    r = np.random.default_rng(2)
    table = random_quantised(r, 50, 384, bits, group)
    ids = np.array([49, 0, 7, 7, 12], np.int32)
    args = {"step": step(0, 4), "ids": ids, "table": rows(table), "x": bf16(np.zeros((5, 384)))}
    out = run(
        "embed", args, {"hidden": 384, "vocab": 50}, {"bits": bits, "group": group}, grid=(5,), threads=(64,),
        order=order, checked=True,
    )["x"]  # fmt: skip
    close(out[:4], table.dense[ids[:4]], 1.0)
    assert np.isnan(out[4].astype(np.float32)).all()


def check_rmsnorm(width: int, order: str) -> None:
    r = np.random.default_rng(width)
    x, w = bf16(r.normal(0, 3, (4, width))), r.normal(1, 0.3, width).astype(np.float32)
    args = {"step": step(0, 3), "x": x, "norm": w, "y": bf16(np.zeros((4, width)))}
    y = run("rmsnorm", args, {"k": width, "eps": EPS}, grid=(4,), threads=(128,), order=order, checked=True)["y"]
    for m in range(3):
        close(y[m], normed(x[m], w))
    assert np.isnan(y[3].astype(np.float32)).all()


def check_last_row() -> None:
    x = bf16(np.arange(5 * 48).reshape(5, 48))
    args = {"step": step(7, 3), "x": x, "y": bf16(np.zeros(48))}
    y = run("last_row", args, {"hidden": 48}, threads=(32,), checked=True)["y"]
    np.testing.assert_array_equal(y, x[2])


def check_copy(size: int) -> None:
    src = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    args = {"src": src, "dst": np.zeros_like(src)}
    out = run("copy", args, {"bytes": size}, grid=(-(-size // 65536),), threads=(256,), checked=size < 100_000)
    np.testing.assert_array_equal(out["dst"], src)
