# SPDX-License-Identifier: Apache-2.0
"""Messages typed at a terminal: editing, history, pastes of several lines, and what is typed while nobody asks.

Not handled: a paste while a reply is written, where the terminal or Python's line editor does not mark pastes (libedit,
which some builds of Python for macOS have): its lines are messages of their own then.
"""

from __future__ import annotations

import importlib
import select
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lily.cli.console import is_terminal
from lily.cli.options import readable

PROMPT = "> "
_PASTE_SECONDS = 0.02  # lines of one unmarked paste follow each other faster than a person types


class Keyboard:
    """Reads messages from standard input, which is a terminal."""

    def __init__(self) -> None:
        self._editor = _line_editor()
        self.marks_pastes = self._editor is not None and "libedit" not in (self._editor.__doc__ or "")
        if self._editor is not None and self.marks_pastes:
            # Python switches it off. A paste is then one line to edit, to send, and to recall from the history.
            self._editor.parse_and_bind("set enable-bracketed-paste on")
            for setting in ("input-meta on", "output-meta on", "convert-meta off"):
                self._editor.parse_and_bind(f"set {setting}")  # bytes above 127 are text, whatever the locale

    def read(self) -> str:
        """The next message. EOFError at the end of the input; KeyboardInterrupt; ValueError if it is not UTF-8 text."""
        typed_ahead = _is_waiting()
        lines = [_line()]
        while not (self.marks_pastes or typed_ahead) and _is_waiting(_PASTE_SECONDS):
            try:
                lines.append(_line(ask=False))
            except EOFError:
                break
        self._remember(lines)
        return readable("\n".join(lines), sys.stdin.encoding)

    @property
    def half_typed(self) -> bool:
        """Whether the line that a KeyboardInterrupt has ended held something."""
        return self._editor is not None and bool(self._editor.get_line_buffer())

    def _remember(self, lines: list[str]) -> None:
        """Makes of the history's entries for ``lines`` a single one."""
        editor = self._editor
        if editor is None or len(lines) == 1:
            return
        for _ in filter(None, lines):  # the editor leaves empty lines out
            editor.remove_history_item(editor.get_current_history_length() - 1)
        editor.add_history("\n".join(lines))


@contextmanager
def hidden_typing() -> Iterator[None]:
    """What is typed meanwhile waits for the next ``read`` and is not shown: it would stand in the middle of a reply."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):
        yield  # no terminal
        return
    silent = [*before]
    silent[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _line_editor() -> Any:
    """Python's ``readline``, which gives input() editing and history; None where it was built without."""
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


def _line(*, ask: bool = True) -> str:
    # Where only standard input is a terminal, input() would write its prompt into the result.
    visible = is_terminal(sys.stdout)
    if ask and not visible:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    return input(PROMPT if ask and visible else "")


def _is_waiting(seconds: float = 0) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])
