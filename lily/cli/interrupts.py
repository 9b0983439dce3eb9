# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a conversation: it ends the reply, not the program, and does not break in where it could tear something."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Notes the first Ctrl-C of a turn and cancels its reply; a second one raises KeyboardInterrupt after all."""

    def __init__(self) -> None:
        self._seen = False
        self._cancel: Callable[[], None] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Ctrl-C is noted in this block. Not so in other threads than the first: signals do not come there."""
        with _handled_by(self._note):
            yield

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt in this block, which waits for a key."""
        with _handled_by(signal.default_int_handler):
            yield

    def begin(self) -> None:
        """A turn begins: forgets what was noted before."""
        self._seen, self._cancel = False, None

    def cancels(self, cancel: Callable[[], None]) -> None:
        """From now on Ctrl-C calls ``cancel``; if there was one in this turn, that is now."""
        self._cancel = cancel
        if self._seen:
            cancel()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True
        if self._cancel is not None:
            self._cancel()


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
