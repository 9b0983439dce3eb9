# SPDX-License-Identifier: Apache-2.0
"""What a request gives back: a reply as it comes, and its pieces."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

FinishReason = Literal["stop", "length"]


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
class Completion:
    """A finished reply. ``completion_tokens`` counts every sampled token, a final stop id included.

    ``seed``: the one that was used, given or drawn; with it the same request gives the same reply again.
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


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a reply as it arrives: text may be empty (inside a character or a possible stop string).

    The last chunk has ``finish_reason`` and ``completion``; all texts joined are ``completion.text``.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


Pieces = Generator[StreamChunk, None, None]


class Control:
    """What the two ends of a stream share. The generator holds this and not the stream, which may be abandoned."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.reader = 0  # ident of the thread that read last
        self.reading = False
        self.stream: weakref.ref[Stream] | None = None

    @property
    def waits_for_this_thread(self) -> bool:
        """Whether the stream is unfinished and the calling thread is the one that would read on."""
        return not self.reading and self.reader == threading.get_ident()


class Stream(Iterator[StreamChunk]):
    """The chunks of a reply. Any thread may end it early; it may be read from one thread after another."""

    def __init__(self, make: Callable[[Control], Pieces]) -> None:
        """``make`` gives the generator of this stream's chunks, which looks at ``Control.cancelled`` as it goes."""
        self._control = Control()
        self._control.stream = weakref.ref(self)
        self._pieces = make(self._control)

    def __next__(self) -> StreamChunk:
        control = self._control
        control.reader, control.reading = threading.get_ident(), True
        try:
            return next(self._pieces)
        finally:
            control.reading = False

    def cancel(self) -> None:
        """Ends the reply at the next chunk of the prompt or the next token, without a completion."""
        self._control.cancelled.set()

    def close(self) -> None:
        """Cancels; unless another thread is reading, the engine is free for the next request on return."""
        self.cancel()
        try:
            self._pieces.close()
        except ValueError:  # it runs in another thread, which will see the flag
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
