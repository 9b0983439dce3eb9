# SPDX-License-Identifier: Apache-2.0
"""A request between the thread that made it and the engine's: what comes of it, and whether it is still wanted.

    engine's thread                     caller's thread
    request.put(event)  ... ──events──→ for event in request.events(): ...
    request.finish(error or None)       request.cancel()

Events wait until they are read, a few of them: then the engine leaves the request alone until its reader comes back
(``pause``), unless others wait for what it holds (``hurried``).
What breaks into the caller's thread (Ctrl-C) ends this request and touches nothing else.
Not handled: which request runs when (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any

_SLICE = 0.05  # seconds
AHEAD = 16  # events that are made before somebody reads them

_END = object()


class Request:
    """One request's way back to its caller. ``wake`` is called when the engine may have to look at it again."""

    def __init__(self) -> None:
        self.cancelled = False
        self.hurried = False  # others wait for what it holds: it goes on, however much is unread
        self.whole = False  # only the end is wanted: nobody is woken for every token
        self.reading = Lock()
        """Held by a thread that waits for what comes next."""
        self.over = Event()
        """Set when the engine has nothing to do with it any more; set from the start until it is submitted."""
        self.over.set()
        self.wake: Callable[[], object] = lambda: None
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._put = self._taken = 0
        self._paused = False

    # ---- the engine's side
    def put(self, event: object) -> None:
        """Something for the reader."""
        self._put += 1
        self._events.put(event)

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more will come; ``error`` is raised where the reader reads on."""
        self._events.put(_END if error is None else error)
        self.over.set()

    def pause(self) -> bool:
        """Whether its reader should read first; the engine is woken when all has been read."""
        if self._put - self._taken < AHEAD or self.hurried:
            return False
        self._paused = True
        return self._put - self._taken >= AHEAD  # it may have read on meanwhile, and seen nothing of the pause

    # ---- the caller's side
    @property
    def idle(self) -> bool:
        """Whether nobody is waiting for what comes next."""
        return not self.reading.locked()

    def events(self) -> Iterator[Any]:
        """What comes, until the end; raises what ended it."""
        while True:
            event = self._next()
            if event is _END:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    def _next(self) -> Any:
        event = self._wait()
        self._taken += 1
        if self._paused and self._taken == self._put:
            self._paused = False
            self.wake()
        return event

    def _wait(self) -> Any:
        """In slices: a signal that another thread received is seen between them."""
        while True:
            with suppress(Empty):
                return self._events.get(timeout=_SLICE)

    def cancel(self) -> None:
        """Nobody wants the rest: it ends at the next token, or chunk of the prompt, and does nothing if it waits."""
        self.cancelled = True
        self.wake()
