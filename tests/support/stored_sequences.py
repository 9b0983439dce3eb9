# SPDX-License-Identifier: Apache-2.0
"""Sequences with KV rows and states in the host's memory, for what writes and reads files of them."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np

from lily.run.history import History

ROW, STATE = 24, 100  # bytes
ROOM = 4096  # tokens


class StoredSequence(History):
    """Two tensors of KV rows; ``fill`` makes contents that follow from tokens and position."""

    def __init__(self) -> None:
        super().__init__(canonical=True)
        self.kv = {name: np.zeros((ROOM, ROW), np.uint8) for name in ("kv.3.k", "kv.3.v")}
        self.slot = np.zeros(STATE, np.uint8)

    @classmethod
    def of(cls, tokens: abc.Sequence[int], points: abc.Iterable[int]) -> StoredSequence:
        made = cls()
        made.tokens = list(tokens)
        made.points = {point: content(tokens[:point], STATE) for point in points}
        for number, rows in enumerate(made.kv.values()):
            rows[: len(tokens)] = content(tokens, len(tokens) * ROW, number).reshape(-1, ROW)
        return made

    # ---- what a Sequence has
    def states(self, *, in_use: bool = False) -> dict[int, Any]:
        return dict(self.points)

    def kv_rows(self, tokens: int) -> dict[str, Any]:
        return {name: rows[:tokens].reshape(-1) for name, rows in self.kv.items()}

    def state(self) -> Any:
        return self.slot

    def adopt(self, tokens: abc.Sequence[int], states: dict[int, Any]) -> None:
        self.slot[:] = states[len(tokens)]
        self.tokens, self.points = list(tokens), states

    def reset(self) -> None:
        self.forget()
        self.slot[:] = 0


def content(tokens: abc.Sequence[int], nbytes: int, number: int = 0) -> Any:
    """Bytes that look like nothing else."""
    return np.random.default_rng([number, *(token % 2**32 for token in tokens[:50]), len(tokens)]).integers(
        0, 256, nbytes, np.uint8
    )
