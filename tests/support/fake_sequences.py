# SPDX-License-Identifier: Apache-2.0
"""Sequences without memory and a runner that makes them, for what decides which of them a request gets."""

from __future__ import annotations

from collections import abc
from types import SimpleNamespace
from typing import Any

from lily.errors import DeviceError
from lily.policy import Policy
from lily.run.history import History


class FakeSequence(History):
    """``sizes``: bytes without tokens, of a token, of a kept state."""

    def __init__(self, canonical: bool, sizes: tuple[int, int, int]) -> None:
        super().__init__(canonical=canonical)
        self._sizes = sizes
        self.copied: list[tuple[FakeSequence, int, bool]] = []

    @property
    def held(self) -> int:
        fixed, token, state = self._sizes
        return fixed + token * len(self.tokens) + state * len(self.points)

    def reset(self) -> None:
        self.forget()

    def snapshot(self) -> None:
        self.points[len(self.tokens)] = None

    def resume(self, prompt: abc.Sequence[int]) -> int:
        position, where = self.point(prompt, in_use=False)
        self.go_to(position, where)
        return position

    def copy_prefix(self, other: FakeSequence, prompt: abc.Sequence[int], *, in_use: bool) -> int:
        position, _ = other.point(prompt, in_use=in_use)
        self.copied.append((other, position, in_use))
        self.forget()
        self.tokens, self.points = list(prompt[:position]), {position: None}
        return position


class FakeRunner:
    """``most``: sequences for which there is memory."""

    def __init__(self, policy: Policy, *, fixed: int = 0, token: int = 1, state: int = 0) -> None:
        self.policy = policy
        self.recorder = SimpleNamespace(before_growth=None)
        self.released: list[FakeSequence] = []
        self.most = 100
        self._sizes = fixed or 2 * state, token, state

    def sequence(self, **_: Any) -> FakeSequence:
        self.most -= 1
        if self.most < 0:
            raise DeviceError("no memory")
        return FakeSequence(self.policy.canonical, self._sizes)

    def release(self, sequence: FakeSequence) -> None:
        sequence.tokens = [-1]  # as nothing may use it any more
        self.released.append(sequence)

    def reserve(self, sequence: FakeSequence, tokens: int) -> None:
        pass
