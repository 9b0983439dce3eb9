# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's state is worth keeping: the places from which later prompts go on, by their role in a chat.

Templates rewrite what the assistant has thought once the user speaks again, so the next prompt departs where the reply
to the last user message began; within a loop of tool calls it departs at the last message; another conversation of the
same client departs inside or at the end of the system message.  Pure functions of tokens.
Not handled: where a prompt may be cut (chunks.py), how many states fit (residents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MESSAGE_START = "<|im_start|>"
_USER, _ASSISTANT = MESSAGE_START + "user", MESSAGE_START + "assistant"
_TOOL_RESULT = _USER + "\n<tool_response>"  # how templates of this family hand over what a tool has returned


@dataclass(frozen=True)
class Marks:
    """How messages begin, as token ids; ``message`` is the first of each, None where there is no such token."""

    message: int | None = None
    user: tuple[int, ...] = ()
    assistant: tuple[int, ...] = ()
    tool_result: tuple[int, ...] = ()

    @classmethod
    def of(cls, encode: Callable[[str], Sequence[int]], id_of: Callable[[str], int | None]) -> Marks:
        """Those of a tokenizer."""
        message = id_of(MESSAGE_START)
        if message is None:
            return cls()
        user, assistant, result = (tuple(encode(text)) for text in (_USER, _ASSISTANT, _TOOL_RESULT))
        return cls(message, user, assistant, result)

    def starts(self, tokens: Sequence[int]) -> list[int]:
        """Where messages begin, but for one at the very beginning."""
        if self.message is None:
            return []
        return [place for place, id in enumerate(tokens) if id == self.message and place]

    def turn(self, tokens: Sequence[int]) -> int:
        """Where the reply to the last message of the user began, the results of tools being none of his; 0: nowhere."""
        starts = self.starts(tokens)
        asked = [s for s in starts if self._is(tokens, s, self.user) and not self._is(tokens, s, self.tool_result)]
        last = asked[-1] if asked else 0
        return next((s for s in starts if s > last and self._is(tokens, s, self.assistant)), 0)

    @staticmethod
    def _is(tokens: Sequence[int], place: int, mark: tuple[int, ...]) -> bool:
        return bool(mark) and tuple(tokens[place : place + len(mark)]) == mark


def places(tokens: Sequence[int], marks: Marks, grid: Iterable[int], shared: Iterable[int]) -> set[int]:
    """Positions at which, or at the last possible one before which, the state of a prompt is kept.

    grid: where the prompt is cut in any case. shared: how many tokens other sequences have in common with it.
    """
    starts, edges = marks.starts(tokens), list(grid)
    kept = {edges[-1]} if edges else set()
    if starts:
        kept |= {starts[0], starts[-1], marks.turn(tokens)}
        kept |= {edge for edge in edges if edge < starts[0]}  # of a long first message other ones share a part
    return {place for place in (*kept, *shared) if 0 < place < len(tokens)}
