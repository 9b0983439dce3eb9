# SPDX-License-Identifier: Apache-2.0
"""Replies of chats, split in pieces of any size: for the tests of the splitter and of what is built on it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lily.text.call_grammar import MARKERS
from lily.text.reply_parts import CallPart, Content, Part, Reasoning, ReplyForm, ReplyParts

START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
THINKING = START + "<think>\n"
ANSWERING = START + "<think>\n\n</think>\n\n"
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "none": {"type": "null"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}},
]
_MARKER = re.compile(f"({'|'.join(MARKERS)})")


@dataclass
class Split:
    """What a splitter has given out."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments: of the complete ones
    cut: tuple[str, str] | None = None  # of the one that is not
    ids: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # of the kinds of parts

    def add(self, part: Part) -> None:
        kind = f"call {part.index}" if isinstance(part, CallPart) else type(part).__name__
        if self.order[-1:] != [kind]:
            self.order.append(kind)
        if isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, Content):
            self.content += part.text
        else:
            self._add_call(part)

    def _add_call(self, part: CallPart) -> None:
        if part.id is not None:
            assert part.name is not None
            assert self.cut is None
            assert part.index == len(self.ids)
            self.ids.append(part.id)
            self.cut = part.name, ""
        assert self.cut is not None, "a part of a call that has ended, or has not begun"
        assert part.index == len(self.ids) - 1
        self.cut = self.cut[0], self.cut[1] + part.arguments
        if part.done:
            self.calls.append(self.cut)
            self.cut = None

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def call(name: str, *parameters: tuple[str, str]) -> str:
    """A call as the template writes it; values as they stand there."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def split(
    pieces: Iterable[str], *, prompt: str = ANSWERING, tools: list[dict[str, Any]] | None = TOOLS, ended: bool = True,
    spelled: bool = False,
) -> Split:  # fmt: skip
    """Pushes ``pieces``; one that is a marker is the token of it, unless markers are ``spelled``."""
    without = MARKERS if spelled else ()
    parts = ReplyParts(ReplyForm.of(prompt, tools), lambda index: f"id{index}", without_token=without)
    result = Split()
    for piece in pieces:
        for part in parts.mark(piece) if piece in MARKERS and not spelled else parts.push(piece):
            result.add(part)
        assert parts.waiting <= 1024
    for part in parts.finish(ended=ended):
        result.add(part)
    return result


def tokens(text: str) -> list[str]:
    """``text`` with each marker a piece of its own, as a tokenizer has them."""
    return [piece for piece in _MARKER.split(text) if piece]


def chopped(text: str, cuts: Iterable[int], *, spelled: bool) -> list[str]:
    """``text`` cut at places; markers are cut only if they are ``spelled``."""
    inside = {i for found in _MARKER.finditer(text) for i in range(found.start() + 1, found.end())}
    edges = {place for found in _MARKER.finditer(text) for place in found.span()}
    places = sorted({*cuts} if spelled else ({*cuts} - inside) | edges)
    return [text[a:b] for a, b in pairwise([0, *(p for p in places if 0 < p < len(text)), len(text)])]


def choppings(text: str, count: int, *, spelled: bool) -> Iterator[list[str]]:
    """Whole, a character at a time, at every single place, and ``count`` drawn ones."""
    yield chopped(text, [], spelled=spelled)
    yield chopped(text, range(len(text)), spelled=spelled)
    for place in range(1, len(text)):
        yield chopped(text, [place], spelled=spelled)
    draw = random.Random(len(text))
    for _ in range(count):
        yield chopped(text, draw.sample(range(len(text) + 1), draw.randint(0, len(text))), spelled=spelled)
