# SPDX-License-Identifier: Apache-2.0
"""A reply on its way from the thread that reads it to the event loop that sends it.

At most ``ROOM`` chunks lie between the two.  A reader that takes none for ``patience`` seconds while there is no room
ends its own reply, so that nothing grows and nobody waits for it.
Not handled: what the chunks become; when to give up a client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from lily.engine import OnPrompt
from lily.streaming import Stream, StreamChunk

ROOM = 256
"""Chunks between thread and event loop."""

GONE, STALLED, STOPPING = "the client has gone", "the reply lay unread for too long", "the server is stopping"


class Relay:
    """One reply. Made in the event loop; ``run`` is for a thread, everything else for the event loop.

    ended: why the reply was cancelled, None if it was not. progress: (tokens of the prompt that are done, in all).
    prompt: the first progress, when only those were done that needed no work.
    """

    def __init__(self, patience: float, room: int = ROOM) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[StreamChunk | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(room)
        self._patience = patience
        self._lock = threading.Lock()
        self._handed: list[StreamChunk | Exception | None] = []  # on its way into the event loop
        self._stream: Stream | None = None
        self._over = False
        self.ended: str | None = None
        self.prompt: tuple[int, int] | None = None
        self.progress: tuple[int, int] | None = None

    # ---- in the thread
    def run(self, *makes: Callable[[OnPrompt], Stream], whole: bool = False) -> None:
        """Reads the streams that ``makes`` give, each to its end; every failure goes to the event loop.

        whole: nothing but its last chunk is wanted.
        """
        last: Exception | None = None
        try:
            for make in makes:
                if self.ended is None:
                    self._read(make(self._note), whole)
        except Exception as error:
            last = error
        finally:
            self._hand_over(last)

    def _read(self, stream: Stream, whole: bool) -> None:
        with stream:
            with self._lock:
                self._stream = stream
            if self.ended is not None:  # before there was something to cancel
                return
            if whole:
                completion = stream.completion(alone=True)
                self._hand_over(StreamChunk(completion.text, completion=completion))
                return
            for chunk in stream:
                if not self._has_room():
                    return
                self._hand_over(chunk)

    def _note(self, done: int, total: int) -> None:
        self.progress = done, total
        self.prompt = self.prompt or self.progress

    def _has_room(self) -> bool:
        if not self._room.acquire(timeout=self._patience):
            self.cancel(STALLED)
        return self.ended is None

    def _hand_over(self, item: StreamChunk | Exception | None) -> None:
        with self._lock:
            self._handed.append(item)
            called = len(self._handed) > 1
        if not called:  # the event loop is woken once for all that comes until it looks
            with suppress(RuntimeError):  # it is closed: nobody will read it
                self._loop.call_soon_threadsafe(self._take_over)

    # ---- in the event loop
    def _take_over(self) -> None:
        with self._lock:
            items, self._handed = self._handed, []
        for item in items:
            self._items.put_nowait(item)

    async def next(self, timeout: float | None = None) -> StreamChunk | None:
        """The next chunk; None at the end. TimeoutError after ``timeout`` seconds, or what has ended the reply."""
        if self._over:
            return None
        item = await asyncio.wait_for(self._items.get(), timeout)
        self._room.release()
        if isinstance(item, StreamChunk):
            return item
        self._over = True
        if item is not None:
            raise item
        return None

    def cancel(self, why: str) -> None:
        """Ends the reply within one token, or one chunk of the prompt. For any thread; the first reason counts."""
        with self._lock:
            if self.ended is None:
                self.ended = why
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._room.release()  # whoever waits for room looks why
