# SPDX-License-Identifier: Apache-2.0
"""Who may use the device: one request at a time, the others in the order in which they came.

    with request.alive:                     # while this lock is held the request counts
        if turns.enter(request, on_idle):   # False: it was cancelled while it waited
            ...
        turns.leave(request)

A request that holds the turn while nobody reads its reply would make the others wait for ever.  So the one that is next
may do something about it: its ``on_idle`` is called with the request that holds the turn, again and again.
What breaks in (Ctrl-C) ends a request and not the queue: it has no lock of its own, only single operations of a list,
which are atomic; and a request counts only as long as it is alive.
Not handled: priorities; several requests at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

_SLICE = 0.05  # seconds after which a waiting thread looks again, should whoever had to wake it have been interrupted


class Request:
    """What takes a turn."""

    def __init__(self) -> None:
        self.alive = threading.Lock()
        """Held while the request waits or runs. One whose lock is free is gone, whatever has interrupted it."""
        self.cancelled = False
        self.wake: SimpleQueue[None] = SimpleQueue()

    @property
    def idle(self) -> bool:
        """Whether it could go on and nobody asks it to."""
        return False


class Turns:
    """The queue of requests; the first of them holds the turn."""

    def __init__(self) -> None:
        self._queue: list[Request] = []

    def enter(self, request: Request, on_idle: Callable[[Request], object] = lambda _: None) -> bool:
        """Waits for the turn. False: the request was cancelled before. ``leave`` must follow either way."""
        self._queue.append(request)
        while not request.cancelled:
            holder, following = self._first_two()
            if holder is request:
                return True
            if following is request and holder.idle:
                on_idle(holder)
            else:
                with suppress(Empty):
                    request.wake.get(timeout=_SLICE)
        return False

    def leave(self, request: Request) -> None:
        """Ends the turn, or the wait for it."""
        with suppress(ValueError):  # it was dropped
            self._queue.remove(request)
        self.notify()

    def notify(self) -> None:
        """Something has changed: a turn ended, a request was cancelled, or nobody reads its reply any more."""
        for request in self._queue[:2]:  # nobody else could go on
            request.wake.put(None)

    def cancelled(self, request: Request) -> None:
        """``request`` was cancelled: it need not wait any longer."""
        request.wake.put(None)

    def _first_two(self) -> tuple[Request, Request]:
        """The holder and the next (the same one if it is alone). Those that are gone without ``leave`` are dropped."""
        for request in tuple(self._queue):
            if not request.alive.locked():
                with suppress(ValueError):  # another thread has dropped it
                    self._queue.remove(request)
        queue = tuple(self._queue)
        return queue[0], queue[min(1, len(queue) - 1)]
