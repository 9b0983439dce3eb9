# SPDX-License-Identifier: Apache-2.0
"""Attention layers with random weights and caches, and what they give by the float64 formulas of the kernel table.

test_cpu_attention.py and test_shaders_attention_decode.py share them.  Not handled: the output gate of decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kernel_harness import Array, from_bf16, to_bf16

EPS = 1e-6
NAN_BF16 = 0x7FC0


@dataclass(frozen=True)
class Shape:
    hq: int = 16
    hkv: int = 2
    dim: int = 256
    rot: int = 64

    @property
    def rep(self) -> int:
        return self.hq // self.hkv

    @property
    def pitch(self) -> int:
        return 2 * (self.hq + self.hkv) * self.dim

    @property
    def heads(self) -> dict[str, int]:
        return {"hq": self.hq, "hkv": self.hkv, "dim": self.dim}


class Layer:
    """Weights of one layer and ``rows`` projected rows whose first stands at ``position``, behind a random cache."""

    def __init__(self, shape: Shape, position: int, rows: int, seed: int = 0, plain: bool = False) -> None:
        r = np.random.default_rng(seed)
        f = np.float32
        self.shape, self.position, self.rows = shape, position, rows
        self.proj = r.normal(0, 1, (rows, shape.pitch)).astype(f)
        self.q_norm, self.k_norm = r.normal(1.5, 0.5, (2, shape.dim)).astype(f)
        self.inv_freq = (1e7 ** (-np.arange(0, shape.rot, 2) / shape.rot)).astype(f)
        cache = (position + rows + 3, shape.hkv, shape.dim)
        if plain:  # a long cache whose contents do not matter
            self.k, self.v = (np.full(cache, 0x3A55, np.uint16) for _ in range(2))
        else:
            self.k, self.v = (to_bf16(r.normal(0, 1, cache).astype(f)) for _ in range(2))
        # Whatever lies behind the last position must not matter.
        self.k[position:], self.v[position:] = NAN_BF16, NAN_BF16

    @property
    def gate(self) -> Array:
        s = self.shape
        return self.proj[:, : 2 * s.hq * s.dim].reshape(-1, s.hq, 2, s.dim)[:, :, 1]

    def open_gates(self) -> None:
        """sigmoid(gate) becomes exactly 1, so that prefill's output can be compared with decode's."""
        self.gate[:] = 100


def rope(x: Array, position: Array, inv_freq: Array) -> Array:
    """x [rows, heads, dim]; angles are float32 products, everything else float64."""
    half = len(inv_freq)
    angle = (position.astype(np.float32)[:, None] * inv_freq).astype(float)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def prepared(layer: Layer) -> tuple[Array, Array, Array]:
    """q, k, v of the rows in float64."""
    s, proj, rows = layer.shape, layer.proj.astype(float), len(layer.proj)
    at = layer.position + np.arange(rows)

    def normed(x: Array, w: Array) -> Array:
        return rope(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w, at, layer.inv_freq)

    q = proj[:, : 2 * s.hq * s.dim].reshape(rows, s.hq, 2, s.dim)[:, :, 0]
    k, v = proj[:, 2 * s.hq * s.dim :].reshape(rows, 2, s.hkv, s.dim).transpose(1, 0, 2, 3)
    return normed(q, layer.q_norm), normed(k, layer.k_norm), v


def attend(q: Array, k: Array, v: Array, position: int) -> Array:
    """softmax(q·kᵀ/√D)·v in float64 over the bf16 cache; q [rows, Hq, D] from ``position`` on."""
    rows, hq, dim = q.shape
    k, v = (np.repeat(from_bf16(x[: position + rows]).astype(float), hq // x.shape[1], 1) for x in (k, v))
    s = np.einsum("mhd,nhd->mhn", q.astype(float), k) / np.sqrt(dim)
    s = np.where(np.arange(position + rows) <= position + np.arange(rows)[:, None, None], s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("mhn,nhd->mhd", e / e.sum(-1, keepdims=True), v)
