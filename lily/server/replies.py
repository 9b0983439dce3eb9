# SPDX-License-Identifier: Apache-2.0
"""What a dialect makes of a reply: the contract, with the ways of OpenAI's chat where a dialect has none of its own.

Pure functions of what came before: nothing here waits or sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from lily.server.errors import RequestError
from lily.server.requests import Request
from lily.streaming import Completion, StreamChunk

Progress = tuple[int, int] | None
"""(tokens of the prompt that are done, tokens in all); None while the request waits for the engine."""

Part = dict[str, Any] | str
"""Of a stream: the object of an event, or a comment."""


class Reply(ABC):
    """A reply in a dialect's objects: those of a stream one by one, or one for all of it.

    ordered: whether the response that is not streamed is made of the reply's chunks, in their order; else its
    completion is enough. closing: what ends a stream.
    """

    ordered = False
    closing = b"data: [DONE]\n\n"

    def begin(self, prompt: Progress) -> Iterator[Part]:
        """What comes before the first token; of the prompt, as the engine found it, what is done needed no work."""
        yield from ()

    def alive(self, progress: Progress) -> Iterator[Part]:
        """A sign of life while nothing else comes. It is never empty, which some clients cannot take."""
        if progress is None:
            yield "waiting for the engine"
        else:
            yield f"{progress[0]} of {progress[1]} tokens of the prompt are read"

    @abstractmethod
    def push(self, chunk: StreamChunk) -> Iterator[Part]:
        """What a chunk makes; one with the end makes the last events."""

    @abstractmethod
    def whole(self, reply: Completion) -> dict[str, Any]:
        """The response that is not streamed; of an ``ordered`` reply after all of its chunks were pushed."""

    def streams(self, error: RequestError) -> bool:
        """Whether a stream that has not begun begins in order to say this, instead of a response with its status."""
        return False

    def failed(self, error: RequestError) -> Iterator[Part]:
        """The end of a stream that goes wrong."""
        yield error.body


class Choices(Reply):
    """Replies to one request, whose chunks come one reply after the other; most often there is one."""

    def __init__(self, request: Request) -> None:
        self._replies, self._done = request.replies, list[Completion]()
        self.ordered = request.replies > 1

    @property
    def _index(self) -> int:
        """Of the reply that is coming."""
        return len(self._done)

    def _all(self, last: Completion) -> list[Completion]:
        """Every reply, of which this one came last."""
        return self._done or [last]
