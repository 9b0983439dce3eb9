# SPDX-License-Identifier: Apache-2.0
"""The chunks of a reply as blocks in their order: reasoning, text and calls, of which each begins, grows and ends.

Dialects that number the parts of a reply are made of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from lily.streaming import StreamChunk, ToolCallDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """``id`` and ``name`` are a call's; ``text`` is its arguments. complete: it was not cut off."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    complete: bool = True
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What has come of it."""
        return "".join(self._parts)

    def add(self, text: str) -> None:
        """More of it."""
        self._parts.append(text)


class Step(Enum):
    """What happens to a block."""

    BEGIN = auto()
    GROW = auto()
    END = auto()


Steps = Iterator[tuple[Step, Block, str]]
"""Of each step its block, and the text by which it grows."""


class Blocks:
    """Of one reply."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._call = -1  # index of the open call among the calls

    def push(self, chunk: StreamChunk) -> Steps:
        """The steps of a chunk; with the reply's end the last block ends."""
        if chunk.reasoning:
            yield from self._grow("reasoning", chunk.reasoning)
        calls = list(chunk.tool_calls)
        if calls and calls[0].index == self._call:  # what ends a call stands before the text behind it
            yield from self._grow("call", calls.pop(0).arguments)
        if chunk.text:
            yield from self._grow("text", chunk.text)
        for delta in calls:
            yield from self._take_call(delta)
        if chunk.completion is not None:
            if self._open is not None and self._open.kind == "call":
                self._open.complete = any(call.id == self._open.id for call in chunk.completion.tool_calls)
            yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Steps:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, self._count))
        if text and self._open is not None:
            self._open.add(text)
            yield Step.GROW, self._open, text

    def _take_call(self, delta: ToolCallDelta) -> Steps:
        if delta.index != self._call:
            yield from self._begin(Block("call", self._count, delta.id or "", delta.name or ""))
            self._call = delta.index
        yield from self._grow("call", delta.arguments)

    def _begin(self, block: Block) -> Steps:
        yield from self._end()
        self._open = block
        self._count += 1
        yield Step.BEGIN, block, ""

    def _end(self) -> Steps:
        if self._open is not None:
            block, self._open, self._call = self._open, None, -1
            yield Step.END, block, ""
