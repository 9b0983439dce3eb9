# SPDX-License-Identifier: Apache-2.0
"""Levels and barriers from byte ranges: pure code, no device.

Dispatches are recorded in the order in which the forward pass names them.  A dispatch conflicts with an earlier one of
the same level when their ranges overlap and at least one of them writes; then a barrier starts the next level.
What the host runs is a level of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lily.plan.views import Dispatch, View


def accesses(dispatch: Dispatch) -> Iterable[tuple[View, bool]]:
    """(range, writes?) of each argument."""
    for arg, view in zip(dispatch.kernel.args, dispatch.views, strict=True):
        yield view, arg.writes


def conflicts(first: Dispatch, second: Dispatch) -> bool:
    """Whether ``second`` must wait for ``first``: read after write, write after read, or write after write."""
    return any((w1 or w2) and v1.overlaps(v2) for v1, w1 in accesses(first) for v2, w2 in accesses(second))


def schedule(dispatches: Sequence[Dispatch], *, every: bool = False) -> tuple[Dispatch, ...]:
    """The dispatches in order with ``level`` and ``barrier`` set; ``every`` puts a barrier before each (ablation)."""
    out: list[Dispatch] = []
    current: list[Dispatch] = []
    level = 0
    for d in dispatches:
        barrier = bool(current) and (every or d.host or any(c.host or conflicts(c, d) for c in current))
        if barrier:
            level += 1
            current = []
        current.append(d)
        out.append(replace(d, level=level, barrier=barrier))
    return tuple(out)
