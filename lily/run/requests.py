# SPDX-License-Identifier: Apache-2.0
"""A request between the thread that made it and the engine's: what comes of it, and whether it is still wanted.

    engine's thread                     caller's thread
    request.put(event)  ... ──events──→ for event in request.events(): ...
    request.finish(error or None)       request.cancel()

Events wait until they are read, a few of them: then the engine leaves the request alone until its reader comes back
(``pause``), unless others wait for what it holds (``hurried``). They come in batches (``Outbox``), through a queue.
What breaks into the caller's thread (Ctrl-C) ends this request and touches nothing else.
Not handled: which request runs when (scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, current_thread, main_thread
from typing import Any

from lily.errors import InvalidRequestError, show
from lily.run._schedule import Outbox

_SLICE = 0.05  # seconds
AHEAD = 32  # events that are made before somebody reads them
BATCH = 16  # events for which a reader is woken, at most
HOLD = 0.005  # seconds for which an event may wait for others that follow

_END = object()


@dataclass(frozen=True)
class Scheduling:
    """When a request gets its turn, and for how long it and its reader are waited for.

    priority: of requests that wait those with the lowest number come first, as in vLLM; a whole number. deadline:
    seconds, from when its reply is asked for, within which the first chunk of the prompt must begin: if it does not, no
    work is done for it. reader_timeout: seconds for which its reply may lie unread before it is ended. Of both None is
    no limit; either ends with a TimeLimitError.
    """

    priority: int = 0
    deadline: float | None = None
    reader_timeout: float | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int:
            raise InvalidRequestError(f"priority is {show(self.priority)}; allowed: a whole number")
        for name in ("deadline", "reader_timeout"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise InvalidRequestError(f"{name} is {show(value)}; allowed: a number of seconds above 0, or None")


class Request(Outbox):
    """One request's way back to its caller. ``wake`` is called when the engine may have to look at it again."""

    def __init__(self, *, hold: float = HOLD) -> None:
        self._batches: SimpleQueue[list[Any]] = SimpleQueue()
        super().__init__(self._batches.put, ahead=AHEAD, batch=BATCH, hold=hold)
        self.reading = Lock()
        """Held by a thread that waits for what comes next."""
        self.over = Event()
        """Set when the engine has nothing to do with it any more; set from the start until it is submitted."""
        self.over.set()
        self.wake: Callable[[], object] = lambda: None

    # ---- the engine's side
    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more will come; ``error`` is raised where the reader reads on."""
        self.flush()
        self._batches.put([_END if error is None else error])
        self.over.set()

    @property
    def unread(self) -> bool:
        """Whether something lies there for its reader."""
        return self.made > self.taken

    # ---- the caller's side
    @property
    def idle(self) -> bool:
        """Whether nobody is waiting for what comes next."""
        return not self.reading.locked()

    def events(self) -> Iterator[Any]:
        """What comes, until the end; raises what ended it."""
        while True:
            for event in self._wait():
                if event is _END:
                    return
                if isinstance(event, BaseException):
                    raise event
                self.taken += 1
                if self.paused and self.taken == self.made:
                    self.paused = False
                    self.wake()
                yield event

    def _wait(self) -> list[Any]:
        """The main thread waits in slices: a signal that another thread received is handled between them."""
        timeout = _SLICE if current_thread() is main_thread() else None
        while True:
            with suppress(Empty):
                return self._batches.get(timeout=timeout)

    def cancel(self) -> None:
        """Nobody wants the rest: it ends at the next token, or chunk of the prompt, and does nothing if it waits."""
        self.cancelled = True
        self.wake()
