# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of the commands: results to the one, everything else to the other.

Not handled: colours, terminals without carriage return, and characters that are two columns wide.
"""

from __future__ import annotations

import errno
import io
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from lily.errors import MESSAGE_LIMIT, LilyError, LilyWarning

_BAR_WIDTH = 30
_LEAST_BAR = 8  # a narrower terminal shortens the title instead
_BAR_SECONDS = 0.1  # between two pictures of the progress bar
_ASSUMED_WIDTH = 80  # of a terminal that does not say
_LONG_PROMPT = 256  # tokens to be read; fewer take no time worth showing


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
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            raise OutputError.of(error) from None

    def aside(self, text: str) -> None:
        """What was asked for by name but is not the result; said even if ``quiet``."""
        _say(text)

    def note(self, text: str) -> None:
        """A remark."""
        if not self.quiet:
            _say(text)

    def detail(self, text: str) -> None:
        """A remark for those who asked for more."""
        if self.verbose and not self.quiet:
            _say(text)

    def error(self, text: str) -> None:
        _say(f"lily: error: {clip(text, MESSAGE_LIMIT)}")

    def interrupted(self) -> None:
        """Leaves the line on which the terminal shows ^C."""
        if is_terminal(sys.stderr):
            _say("")

    def progress(self, title: str) -> Progress | None:
        """A progress bar of bytes, if there is somebody to see it."""
        return Progress(title, gigabytes) if self._is_watched() else None

    def reading(self) -> Reading | None:
        """A progress bar of a prompt's tokens, if there is somebody to see it."""
        return Reading() if self._is_watched() else None

    def _is_watched(self) -> bool:
        return not self.quiet and is_terminal(sys.stderr)


def gigabytes(done: int, total: int) -> str:
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"


def tokens(done: int, total: int) -> str:
    return f"{done:,} of {total:,} tokens"


class Progress:
    """A line on a terminal, never wider than it: the title at once, then how much is done; call it with (done, total).

    ``amount`` says both numbers in words.
    """

    def __init__(self, title: str, amount: Callable[[int, int], str]) -> None:
        self._title, self._amount, self._shown = title, amount, -math.inf
        _show_line(clip(title, _columns()))

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < _BAR_SECONDS and done < total:
            return
        self._shown = now
        amount = self._amount(done, total)
        room = _columns() - len(amount) - len(" [] ")
        width = max(_LEAST_BAR, min(_BAR_WIDTH, room - len(self._title)))
        bar = "#" * round((min(done / total, 1.0) if total else 1.0) * width)
        _show_line(clip(f"{clip(self._title, room - width)} [{bar:<{width}}] {amount}", _columns()))

    def clear(self) -> None:
        """Takes the line away."""
        _say("\r\x1b[K", end="")


class Reading:
    """A progress bar for the ``on_prompt`` of a request; nothing for a short prompt, and gone when it is read."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._begun = False

    def __call__(self, done: int, total: int) -> None:
        if not self._begun and total - done >= _LONG_PROMPT:
            self._bar = Progress("reading the prompt", tokens)
        self._begun = True
        if done >= total:
            self.clear()
        elif self._bar:
            self._bar(done, total)

    def clear(self) -> None:
        """Takes the line away, if there is one."""
        if self._bar:
            self._bar.clear()
            self._bar = None


def clip(text: str, width: int) -> str:
    """``text``, or its beginning and "..." where it is longer than ``width``."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."[: max(0, width)]


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


def terminal_width(stream: TextIO | None) -> int | None:
    """Columns of the terminal behind ``stream``, None if there is no terminal."""
    if stream is None or not is_terminal(stream):
        return None
    with suppress(OSError, ValueError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return _ASSUMED_WIDTH


def discard(stream: TextIO | Any) -> None:
    """Lets what ``stream`` still holds, and gets, go nowhere."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
    except (OSError, ValueError, AttributeError):
        return  # no file behind it: nothing will complain


class _Closed(io.TextIOBase):
    """Stands for a standard output that was closed before the program began: what is written to it fails."""

    def write(self, text: str) -> NoReturn:
        raise OSError(errno.EBADF, "it is closed")


@contextmanager
def standard_streams() -> Iterator[None]:
    """Lets a command use every standard stream, also where the caller has closed some of them.

    Otherwise Python would have None in their place, for which ``print`` takes standard output, and the next file that
    is opened would get their number, so that messages of libraries would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # stays open as long as the process
    os.close(descriptor)
    before = sys.stdout, sys.stderr
    sink = open(os.devnull, "w") if sys.stderr is None else None  # noqa: SIM115
    try:
        sys.stdout = sys.stdout or _Closed()
        sys.stderr = sys.stderr or sink
        _make_writable()
        yield
    finally:
        sys.stdout, sys.stderr = before
        if sink:
            sink.close()


def _make_writable() -> None:
    """A character that the terminal's encoding lacks becomes ``?`` instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def _columns() -> int:
    """Room of a line on standard error; the last column is left free, as some terminals wrap when it is filled."""
    return (terminal_width(sys.stderr) or _ASSUMED_WIDTH) - 1


def _show_line(text: str) -> None:
    """In place of what the line held before."""
    _say(f"\r{text}\x1b[K", end="")


def _say(text: str, end: str = "\n") -> None:
    """To standard error; a failure there has no place to be reported."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)
