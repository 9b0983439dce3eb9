# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of the commands: results to the one, everything else to the other.

Not handled: colours, and terminals without carriage return.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from lily.errors import LilyError, LilyWarning

_BAR_WIDTH = 30
_BAR_SECONDS = 0.1  # between two pictures of the progress bar


class OutputError(LilyError):
    """Standard output cannot be written."""

    def __init__(self, reason: str, *, broken_pipe: bool = False) -> None:
        super().__init__(f"standard output cannot be written: {reason}")
        self.broken_pipe = broken_pipe

    @classmethod
    def of(cls, error: OSError) -> OutputError:
        return cls(error.strerror or str(error), broken_pipe=error.errno == errno.EPIPE)


@dataclass
class Console:
    """What a command says, and how much of it. Errors are said even if ``quiet``."""

    quiet: bool = False
    verbose: bool = False

    def write(self, text: str) -> None:
        """Part of the result, visible at once; OutputError if that fails."""
        if not text:
            return
        if sys.stdout is None:
            raise OutputError("it is closed")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            raise OutputError.of(error) from None

    def end_line(self) -> None:
        """Ends the line that a terminal shows; a file or pipe gets nothing that is not part of the result."""
        if is_terminal(sys.stdout):
            self.write("\n")

    def note(self, text: str) -> None:
        """A remark."""
        if not self.quiet:
            _say(text)

    def detail(self, text: str) -> None:
        """A remark for those who asked for more."""
        if self.verbose and not self.quiet:
            _say(text)

    def error(self, text: str) -> None:
        _say(f"lily: error: {text}")

    def interrupted(self) -> None:
        """Leaves the line on which the terminal shows ^C."""
        if is_terminal(sys.stderr):
            _say("")

    def progress(self, title: str) -> Progress | None:
        """A progress bar, if there is somebody to see it."""
        return None if self.quiet or not is_terminal(sys.stderr) else Progress(title)


class Progress:
    """A line on a terminal that shows bytes done; call it with (done, total)."""

    def __init__(self, title: str) -> None:
        self._title, self._shown = title, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < _BAR_SECONDS and done < total:
            return
        self._shown = now
        part = min(done / total, 1.0) if total else 1.0
        bar = "#" * round(part * _BAR_WIDTH)
        _say(f"\r{self._title} [{bar:<{_BAR_WIDTH}}] {done / 1e9:.2f} of {total / 1e9:.2f} GB", end="")

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            _say("\r\x1b[K", end="")


@contextmanager
def warnings_as_notes(console: Console) -> Iterator[None]:
    """What Lily warns of is a remark like any other, without the line of code that was at fault."""

    def note(message: Warning | str, *rest: Any, **more: Any) -> None:
        console.note(f"lily: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default", LilyWarning)
        warnings.showwarning = note
        yield


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def make_writable() -> None:
    """A character that the terminal's encoding lacks becomes `?` instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def discard(stream: TextIO | Any) -> None:
    """Lets what ``stream`` still holds, and gets, go nowhere."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
    except (OSError, ValueError, AttributeError):
        return  # no file behind it: nothing will complain


def _say(text: str, end: str = "\n") -> None:
    """To standard error; a failure there has no place to be reported."""
    if sys.stderr is None:
        return
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)
