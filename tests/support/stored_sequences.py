# SPDX-License-Identifier: Apache-2.0
"""Sequences with KV rows and states in the host's memory, for what writes and reads files of them."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np

from lily.run.history import History

ROW, STATE = 24, 100  # bytes
ROOM = 4096  # tokens


class Rows:
    """Memory as a Buffer has it."""

    def __init__(self) -> None:
        self.bytes = np.zeros(ROOM * ROW, np.uint8)

    def read(self, start: int, nbytes: int) -> Any:
        return self.bytes[start : start + nbytes].copy()

    def write(self, data: Any, start: int = 0) -> None:
        self.bytes[start : start + data.size] = data


class StoredSequence(History):
    """Two tensors of KV rows; ``fill`` makes contents that follow from tokens and position."""

    def __init__(self) -> None:
        super().__init__(canonical=True)
        self.kv = {name: Rows() for name in ("kv.3.k", "kv.3.v")}
        self.slot = np.zeros(STATE, np.uint8)

    @classmethod
    def of(cls, tokens: abc.Sequence[int], points: abc.Iterable[int]) -> StoredSequence:
        made = cls()
        made.tokens = list(tokens)
        made.points = {point: content(tokens[:point], STATE) for point in points}
        for number, rows in enumerate(made.kv.values()):
            rows.write(content(tokens, len(tokens) * ROW, number))
        return made

    # ---- what a Sequence has
    def states(self, *, in_use: bool = False) -> dict[int, Any]:
        return dict(self.points)

    kv_row_bytes, state_bytes = ROW, STATE

    def positions(self) -> set[int]:
        return set(self.points)

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
