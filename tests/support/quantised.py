# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices for the tests of kernels: random ones, their float64 weights, their bytes in both layouts.

Not handled: checkpoints (checkpoints.py); what a model loads (test_weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kernel_calls import Array
from kernel_harness import from_bf16, to_bf16


@dataclass
class Quantised:
    """A random matrix [n, k] as its unsigned values, bf16 scales and biases."""

    values: Array  # [n, k] integers
    scales: Array  # [n, k/group] bits
    biases: Array
    bits: int
    group: int

    @property
    def dense(self) -> Array:
        """float64 weights."""
        n, k = self.values.shape
        q = self.values.reshape(n, k // self.group, self.group).astype(np.float64)
        return (q * from_bf16(self.scales)[..., None] + from_bf16(self.biases)[..., None]).reshape(n, k)

    @property
    def words(self) -> Array:
        """uint32 [n, k·bits/32], lowest bits first."""
        per = 32 // self.bits
        n, k = self.values.shape
        parts = self.values.reshape(n, k // per, per).astype(np.uint32) << (np.arange(per, dtype=np.uint32) * self.bits)
        return np.bitwise_or.reduce(parts, axis=2)

    @property
    def constants(self) -> dict[str, int]:
        return {"bits": self.bits, "group": self.group}


def random_quantised(rng: np.random.Generator, n: int, k: int, bits: int, group: int) -> Quantised:
    values = rng.integers(0, 1 << bits, (n, k))
    scales = rng.normal(size=(n, k // group)) / (np.sqrt(k) * (1 << bits) / 4)
    biases = -scales * (1 << bits) / 2 + rng.normal(size=scales.shape) / np.sqrt(k) / 4
    return Quantised(values, to_bf16(scales), to_bf16(biases), bits, group)


def rows16(*matrices: Quantised) -> Array:
    """Bytes of the rows16 layout, written element by element from its definition; matrices follow each other."""
    out = bytearray()
    for m in matrices:
        n, k = m.values.shape
        per_group = m.group * m.bits // 32
        words = np.zeros((-(-n // 16) * 16, k * m.bits // 32), np.uint32)
        scales, biases = (np.zeros((len(words), k // m.group), np.uint16) for _ in range(2))
        words[:n], scales[:n], biases[:n] = m.words, m.scales, m.biases
        for block in range(0, len(words), 16):
            rows = slice(block, block + 16)
            for g in range(k // m.group):
                for j in range(per_group):
                    out += words[rows, g * per_group + j].tobytes()
                out += scales[rows, g].tobytes() + biases[rows, g].tobytes()
    return np.frombuffer(bytes(out), np.uint8).copy()


def qrows(m: Quantised) -> Array:
    """Bytes of the row-major layout: words, scales, biases, each at a multiple of 256 bytes."""
    out = bytearray()
    for section in (m.words, m.scales, m.biases):
        out += section.tobytes()
        out += bytes(-len(out) % 256)
    return np.frombuffer(bytes(out), np.uint8).copy()
