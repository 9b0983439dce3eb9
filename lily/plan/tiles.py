# SPDX-License-Identifier: Apache-2.0
"""Tiles of the GEMM kernels: rows are a constant of the pipeline, outputs a parameter.

Not handled: which tile suits which number of rows (``Policy.gemm_tile``, ``Policy.moe_tile``).
"""

from __future__ import annotations

from dataclasses import dataclass

from lily.plan.builder import groups
from lily.plan.weights_map import Matrix
from lily.policy import Policy


@dataclass(frozen=True)
class Tile:
    """``m`` rows by ``n`` outputs."""

    m: int
    n: int

    @classmethod
    def of(cls, policy: Policy, m: int, parts: int = 1) -> Tile:
        """The tile of ``m`` rows; ``parts``: matrices computed together (2 for gate and up)."""
        return cls(m, policy.tile_columns(m, parts))

    @classmethod
    def dense(cls, policy: Policy, rows: int, parts: int = 1) -> Tile:
        """The tile of a dense GEMM over ``rows`` rows."""
        return cls.of(policy, policy.gemm_tile(rows), parts)

    def grid(self, n: int, rows: int) -> tuple[int, int]:
        """Groups for ``n`` outputs of ``rows`` rows."""
        return groups(n, self.n), groups(rows, self.m)

    def constants(self, w: Matrix) -> dict[str, int]:
        """Constants of a GEMM of ``w``."""
        return {**w.constants, "tile_m": self.m}
