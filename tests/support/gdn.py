# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers with random weights, and what they give by the float64 formulas of the kernel table.

test_cpu_gdn.py and test_shaders_gdn.py share them.  Not handled: the projections around the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kernel_harness import Array

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    hk: int = 2
    hv: int = 4
    dk: int = 128
    dv: int = 128
    taps: int = 4

    @property
    def rep(self) -> int:
        return self.hv // self.hk

    @property
    def channels(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def pitch(self) -> int:
        return self.channels + self.hv * self.dv + 2 * self.hv

    @property
    def heads(self) -> dict[str, int]:
        return {"hk": self.hk, "hv": self.hv, "dk": self.dk, "dv": self.dv}


@dataclass
class Layer:
    """Weights and state of one layer, and ``rows`` projected rows."""

    shape: Shape
    proj: Array
    conv_w: Array
    a_log: Array
    dt_bias: Array
    norm: Array
    conv: Array
    state: Array

    @classmethod
    def random(cls, shape: Shape, rows: int, seed: int = 0) -> Layer:
        r = np.random.default_rng(seed)
        f = np.float32
        return cls(
            shape,
            r.normal(0, 1, (rows, shape.pitch)).astype(f),
            r.normal(0, 0.5, (shape.channels, shape.taps)).astype(f),
            r.uniform(-2, 2, shape.hv).astype(f),
            r.normal(0, 1, shape.hv).astype(f),
            r.normal(1, 0.2, shape.dv).astype(f),
            r.normal(0, 1, (shape.taps - 1, shape.channels)).astype(f),
            r.normal(0, 0.3, (shape.hv, shape.dk, shape.dv)).astype(f),
        )


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0)


@dataclass
class Result:
    q: Array
    k: Array
    v: Array
    gate: Array
    beta: Array
    o: Array
    y: Array
    conv: Array
    state: Array


def reference(layer: Layer) -> Result:
    """The whole layer between its projections, in float64."""
    s, rows = layer.shape, len(layer.proj)
    proj, w = layer.proj.astype(float), layer.conv_w.astype(float)
    c = np.concatenate([layer.conv.astype(float), proj[:, : s.channels]])
    y = sum(c[j : j + rows] * w[:, j] for j in range(s.taps))
    y = y * sigmoid(y)
    nk = s.hk * s.dk
    q, k = y[:, :nk].reshape(rows, s.hk, s.dk), y[:, nk : 2 * nk].reshape(rows, s.hk, s.dk)
    v = y[:, 2 * nk :].reshape(rows, s.hv, s.dv)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(s.dk)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    z, b, a = np.split(proj[:, s.channels :], [s.hv * s.dv, s.hv * s.dv + s.hv], axis=1)
    beta = sigmoid(b)
    gate = np.exp(-np.exp(layer.a_log.astype(float)) * softplus(a + layer.dt_bias))
    state, o = layer.state.astype(float), np.empty((rows, s.hv, s.dv))
    for t in range(rows):
        kt, qt = np.repeat(k[t], s.rep, 0), np.repeat(q[t], s.rep, 0)
        state = state * gate[t][:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, kt))
        state = state + kt[:, :, None] * d[:, None, :]
        o[t] = np.einsum("hkv,hk->hv", state, qt)
    z = z.reshape(rows, s.hv, s.dv)
    n = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * layer.norm
    return Result(q, k, v, gate, beta, o, (z * sigmoid(z) * n).reshape(rows, -1), c[rows:], state)


def scan_512() -> tuple[Layer, Result]:
    """Slow decay and 512 tokens: what a low-precision state cannot survive."""
    layer = Layer.random(Shape(1, 2, 64, 64), 512, seed=5)
    layer.a_log[:] = -6
    return layer, reference(layer)
