# SPDX-License-Identifier: Apache-2.0
"""What a request gives back: a reply as it comes, whole and in chunks."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

from lily.errors import LilyError
from lily.run.turns import Request, Turns

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
    ``reasoning``: None if there was none.
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


class Control(Request):
    """What the two ends of a stream share. The generator holds this and not the stream, which may be abandoned."""

    def __init__(self, stream: Stream | None = None) -> None:
        super().__init__()
        self._stream = None if stream is None else weakref.ref(stream)

    @property
    def stream(self) -> Stream | None:
        """The stream, as long as somebody has it; None for a call that reads its reply itself."""
        return self._stream() if self._stream else None

    @property
    def idle(self) -> bool:
        """Whether the stream could be read on, and no thread is reading."""
        stream = self.stream
        return stream is not None and not stream.reading


class Stream(Iterator[StreamChunk]):
    """The chunks of a reply. Any thread may read or end it.

    A request that waits for the engine while nobody reads this stream reads it ahead; then they are kept here.
    """

    def __init__(self, turns: Turns, make: Callable[[Control], ReplyChunks]) -> None:
        """``make`` gives the generator of this stream's chunks, which looks at ``Control.cancelled`` as it goes."""
        self._turns = turns
        self._control = Control(self)
        self._chunks = make(self._control)
        self._reading = threading.Lock()
        self._ahead: deque[StreamChunk] = deque()
        self._failure: LilyError | None = None  # what ended the reply while it was read ahead

    @property
    def reading(self) -> bool:
        """Whether a thread is waiting for the next chunk."""
        return self._reading.locked()

    def __next__(self) -> StreamChunk:
        try:
            with self._reading:
                return self._next()
        finally:
            self._turns.notify()  # nobody is reading now

    def _next(self) -> StreamChunk:
        if self._control.cancelled:
            self._chunks.close()
            raise StopIteration
        if self._ahead:
            return self._ahead.popleft()
        if self._failure is not None:
            raise self._failure
        return next(self._chunks)

    def completion(self) -> Completion:
        """Reads to the end; nobody else can read meanwhile. LilyError: the stream was cancelled."""
        with self._reading:
            for chunk in iter(self._next, None):
                if chunk.completion is not None:
                    return chunk.completion
        raise LilyError("the reply was cancelled before its end")

    def read_ahead(self) -> None:
        """Takes one chunk more for whoever will read on, unless a thread is reading."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            chunk = next(self._chunks, None)
            if chunk is not None:
                self._ahead.append(chunk)
        except LilyError as error:
            self._failure = error
        except BaseException:
            self._failure = LilyError("the reply was interrupted while another request waited for it")
            raise
        finally:
            self._reading.release()

    def cancel(self) -> None:
        """Ends the reply at the next chunk of the prompt or the next token, without a completion."""
        self._control.cancelled = True
        self._turns.cancelled(self._control)

    def close(self) -> None:
        """Cancels; unless another thread is reading, the engine is free for the next request on return."""
        self.cancel()
        with suppress(ValueError):  # it runs in another thread, which will see the flag
            self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
