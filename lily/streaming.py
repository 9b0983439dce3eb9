# SPDX-License-Identifier: Apache-2.0
"""What a request gives back: a reply as it comes, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

from lily.errors import LilyError
from lily.run.requests import Request

FinishReason = Literal["stop", "length", "tool_calls"]
"""``stop``: the model ended the reply, or a stop string did. ``length``: a limit cut it. ``tool_calls``: the model
ended it, and it holds at least one complete call."""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a generated token under the raw logits, and of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request. The first token counts to the prompt, as it comes out of its last chunk."""

    prompt_seconds: float
    generation_seconds: float
    prompt_tokens_per_second: float
    """Of the tokens that were really run, without the cached ones."""
    generation_tokens_per_second: float


@dataclass(frozen=True)
class ToolCall:
    """A complete call of a tool. ``arguments``: the text of a JSON object, in the order in which they were written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of call number ``index`` of a reply, as it is written.

    ``id`` and ``name`` come once, with the first part of a call. The ``arguments`` of all parts of one index joined are
    the ``arguments`` of the finished call. A reply that is cut off inside a call has parts of a call that
    ``Completion.tool_calls`` has not.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Completion:
    """A finished reply. ``completion_tokens`` counts every sampled token, a final stop id included.

    ``seed``: the one that was used, given or drawn; with it the same request gives the same reply again. Of a chat
    ``text`` is the content alone; of a plain prompt it is everything, and there is no ``reasoning`` and no call.
    ``reasoning``: None if there was none. ``reasoning_tokens``: how many of the tokens were written while it lasted,
    its end included. ``stop``: the stop string that ended the reply, if one did. ``reuse``: why so much of the prompt
    was there already, and no more: ``cold``, ``hit``, ``diverged at token N`` from what was read, or ``evicted``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None
    timings: Timings
    seed: int
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    stop: str | None = None
    reuse: str = "cold"


@dataclass(frozen=True)
class StreamChunk:
    """A chunk of a reply as it arrives: text may be empty (inside a character or a possible stop string).

    The last chunk has ``finish_reason`` and ``completion``. All texts joined are ``completion.text``, all reasonings
    ``completion.reasoning``, and the parts of each complete call that call.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


ReplyChunks = Generator[StreamChunk, None, None]


class Stream(Iterator[StreamChunk]):
    """The chunks of a reply, which begins when the first of them is asked for. Any thread may read or end it.

    A few chunks are made before they are read. While nobody reads on, other requests have the device.
    """

    def __init__(self, make: Callable[[Request], ReplyChunks]) -> None:
        """``make`` gives the generator of this stream's chunks, for a request of its own."""
        self._request = Request()
        self._chunks = make(self._request)

    @property
    def reading(self) -> bool:
        """Whether a thread is waiting for the next chunk."""
        return self._request.reading.locked()

    def __next__(self) -> StreamChunk:
        with self._request.reading:
            return self._next()

    def _next(self) -> StreamChunk:
        if self._request.cancelled:
            self._chunks.close()
            raise StopIteration
        return next(self._chunks)

    def completion(self, *, alone: bool = False) -> Completion:
        """Reads to the end; nobody else can read meanwhile. LilyError: the stream was cancelled.

        alone: of what has not been made yet nothing else will be looked at, which spares a wake-up for every token.
        """
        self._request.whole |= alone
        with self._request.reading:
            for chunk in iter(self._next, None):
                if chunk.completion is not None:
                    return chunk.completion
        raise LilyError("the reply was cancelled before its end")

    def cancel(self) -> None:
        """Ends the reply at the next chunk of the prompt or the next token, without a completion."""
        self._request.cancel()

    def close(self) -> None:
        """Cancels; unless another thread is reading, the device does nothing more for it on return."""
        self.cancel()
        with suppress(ValueError):  # it runs in another thread, which will see the flag
            self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
