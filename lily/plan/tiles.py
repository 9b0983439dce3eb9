# SPDX-License-Identifier: Apache-2.0
"""Tiles of the GEMM kernels: rows are a constant of the pipeline, outputs a parameter; and how rows become tiles.

Not handled: which tile suits which number of rows (``Policy.gemm_tile``, ``Policy.moe_tile``).
"""

from __future__ import annotations

from dataclasses import dataclass

from lily.plan.builder import groups
from lily.plan.views import Values, View
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


@dataclass(frozen=True)
class Routed:
    """Rows grouped by expert, as route_group leaves them: ``blocks`` tiles of ``tile_m`` places each."""

    offsets: View
    order: View
    block_map: View
    blocks: int
    tile_m: int

    @property
    def views(self) -> Values:
        """By the names of the kernel table."""
        return {"offsets": self.offsets, "order": self.order, "blocks": self.block_map}
