# SPDX-License-Identifier: Apache-2.0
"""Replies whose tokens are given, while everything before and after them is real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from lily.engine import Engine
from lily.run.reply import Reply, Token

TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}},
    }}
]  # fmt: skip
_TIMES = "<parameter=times>\n2\n</parameter>\n"
CALL = f"<tool_call>\n<function=look>\n<parameter=at>\n{{}}\n</parameter>\n{_TIMES}</function>\n</tool_call>"


@contextmanager
def writing(engine: Engine, text: str | Iterable[str], end: bool = True) -> Iterator[None]:
    """The model writes ``text``, or its pieces in tokens of their own, whatever it would have written, and ends."""
    pieces = [text] if isinstance(text, str) else text
    ids = [id for piece in pieces for id in engine.tokenizer.encode(piece)]
    ids += [engine.tokenizer.id_of("<|im_end|>")] if end else []
    before = Reply.next
    scripts: dict[Reply, Iterator[Any]] = {}

    def given(reply: Reply) -> Token | None:
        token = before(reply)
        script = scripts.setdefault(reply, iter(enumerate(ids, 1)))
        number, chosen = next(script)
        return None if token is None else replace(token, id=chosen, stopped=end and number == len(ids))

    with mock.patch.object(Reply, "next", given):
        yield
