# SPDX-License-Identifier: Apache-2.0
"""Tokens that a sequence has consumed, and the points to which it can go back.  Needs no device.

The current slot holds the state after all tokens, the other one that of one chunk or step before; kept points have
copies of theirs.  Not handled: the states themselves (sequence.py).
"""

from __future__ import annotations

from collections import abc
from operator import itemgetter
from typing import Any


class History:
    """canonical: only kept points give a cold run's bits, since slots may hold states between chunk edges."""

    def __init__(self, *, canonical: bool) -> None:
        self.tokens: list[int] = []
        self.points: dict[int, Any] = {}
        """Kept states by position."""
        self._canonical = canonical
        self._previous = -1  # position of the other slot's state, -1 if it holds none

    @property
    def latest(self) -> int:
        """The last position to which it can go back."""
        return max((position for position, _ in self._candidates(in_use=False)), default=0)

    # ---- tokens
    def append(self, chunk: abc.Sequence[int]) -> None:
        """``chunk`` has been consumed: its state is in the other slot."""
        self._previous = len(self.tokens)
        self.tokens.extend(chunk)

    def take_back(self, start: int) -> None:
        """Forgets the chunk that began at ``start``."""
        self._previous = -1
        del self.tokens[start:]

    def forget(self) -> None:
        """No tokens, no points."""
        self.tokens, self.points, self._previous = [], {}, -1

    # ---- points
    def point(self, prompt: abc.Sequence[int], *, in_use: bool, shared: int | None = None) -> tuple[int, str]:
        """The latest position that can be resumed for ``prompt``, and where its state is.

        It is at least one token before the prompt's end. Where: in the current or the previous slot, kept, or nowhere
        (start). The slots of a sequence in use are written by the steps in flight: its kept points alone count.
        shared: how many tokens are in common, if that is known.
        """
        limit = min(common_prefix(self.tokens, prompt) if shared is None else shared, len(prompt) - 1)
        found = [c for c in self._candidates(in_use=in_use) if 0 < c[0] <= limit]
        return max(found, key=itemgetter(0), default=(0, "start"))  # of equal positions the first: it needs no copy

    def _candidates(self, *, in_use: bool) -> list[tuple[int, str]]:
        kept = [(position, "kept") for position in self.points]
        return (
            kept if in_use or self._canonical else [(len(self.tokens), "current"), (self._previous, "previous"), *kept]
        )

    def go_to(self, position: int, where: str) -> None:
        """All beyond ``position`` is dropped; ``where`` as ``point`` says it."""
        if where != "current":
            self._previous = -1
        del self.tokens[position:]
        self.points = {place: state for place, state in self.points.items() if place <= position}

    def keep_only(self, positions: abc.Container[int]) -> None:
        """Drops the other points."""
        self.points = {place: state for place, state in self.points.items() if place in positions}


def common_prefix(a: abc.Sequence[int], b: abc.Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    x, y = list(a), list(b)
    low, high = 0, min(len(x), len(y))
    if x[:high] == y[:high]:
        return high
    while high - low > 1:  # the first low tokens are equal, the first high are not
        middle = (low + high) // 2
        if x[low:middle] == y[low:middle]:
            low = middle
        else:
            high = middle
    return low
