# SPDX-License-Identifier: Apache-2.0
"""A reply on standard output: its content, and its reasoning where that is wanted.

Reasoning is dimmed on a terminal. Elsewhere, and with NO_COLOR set, it stands between its tags.
Not handled: calls of tools, which no command offers.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from lily.cli.console import Console, is_terminal

if TYPE_CHECKING:
    from lily.streaming import StreamChunk

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_THINK, _THINK_END = "<think>\n", "\n</think>\n\n"


class ShownReply:
    """Writes one reply. It is made to end with a line break: what follows begins a line of its own."""

    def __init__(self, console: Console, reasoning: bool | None) -> None:
        """reasoning: whether it is shown; None: on a terminal."""
        terminal = is_terminal(sys.stdout)
        self._console = console
        self._with_reasoning = terminal if reasoning is None else reasoning
        self._dims = terminal and not os.environ.get("NO_COLOR")
        self._reasons = False  # what was written last is reasoning
        self._in_line = True

    def chunk(self, chunk: StreamChunk) -> None:
        if chunk.reasoning and self._with_reasoning:
            self._reasoning(chunk.reasoning)
        if chunk.text and self._reasons:
            self._reasons = False
            self.text("\n\n" if self._dims else _THINK_END)
        self.text(chunk.text)

    def _reasoning(self, text: str) -> None:
        if not self._reasons and not self._dims:
            self.text(_THINK)
        self._reasons = True
        # Each piece by itself: whatever ends the command, the terminal is left as it was.
        self.text(text, dim=self._dims)

    def text(self, text: str, *, dim: bool = False) -> None:
        self._console.write(f"{_DIM}{text}{_PLAIN}" if dim else text)
        self._in_line = not text.endswith("\n") if text else self._in_line

    def end(self) -> None:
        if self._in_line:
            self._console.write("\n")
