# SPDX-License-Identifier: Apache-2.0
"""What the next token of a reply may be, so that the reply obeys its demands, whatever the model would draw.

A guide is a course through one reply: a generator that yields what is allowed next and is sent what was drawn.  Tokens
that are forced are those that nothing else is allowed beside.  Not handled: what a grammar allows (grammars.py).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lily.errors import InvalidRequestError
from lily.text.call_grammar import CALL, CALL_END, THINK_END
from lily.text.demands import Demands, Tools, function_of
from lily.text.grammars import Grammar, Grammars
from lily.text.reply_parts import ReplyForm
from lily.text.tokenizer import Tokenizer

CLOSING = "\n\nThe budget for thinking is used up, so I answer now.\n"
"""Ends reasoning that has used up its budget; ``</think>`` follows."""
FOREVER = 1 << 62

Mask = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class Free:
    """Any id, for at least so many ``tokens``."""

    tokens: int = 1


@dataclass(frozen=True)
class Only:
    """Nothing but these ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Except:
    """Any id but these."""

    ids: tuple[int, ...]


Allowed = Free | Only | Except | Grammar
Course = Generator[Allowed, int, None]


class Guide:
    """Says what may come next and takes what came."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._allowed = next(course)

    @property
    def free(self) -> int:
        """So many tokens from here on may be any; 0: the next one may not."""
        return self._allowed.tokens if isinstance(self._allowed, Free) else 0

    def write(self, mask: Mask) -> None:
        """Bit id%32 of mask[id/32] says whether the next token may be ``id``. InvalidRequestError: none may."""
        allowed = self._allowed
        mask[:] = 0xFFFFFFFF if isinstance(allowed, (Free, Except)) else 0
        if isinstance(allowed, Grammar):
            allowed.write(mask)
        elif not isinstance(allowed, Free):
            for id in allowed.ids:
                mask[id // 32] ^= np.uint32(1 << id % 32)
        if not mask.any():
            raise InvalidRequestError("the reply cannot go on as it has to; give a simpler schema, or none")

    def take(self, id: int) -> None:
        """The token that was drawn."""
        self._allowed = self._course.send(id)


class Guides:
    """Makes the guides of a model's replies. Any thread may ask; what is slow is done in the one that does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)

    def guide(self, demands: Demands, form: ReplyForm, tools: Tools | None, stop_ids: Sequence[int]) -> Guide | None:
        """What holds a reply of this ``form`` to ``demands``; None if there is nothing to hold it to.

        InvalidRequestError: demands that no reply can obey, or that are too large.
        """
        budget = demands.reasoning_tokens if form.reasoning else None
        if not demands.call and demands.schema is None and (demands.parallel or form.tools is None) and budget is None:
            return None
        held = demands.call or demands.schema is not None
        if held and not stop_ids:
            raise InvalidRequestError("ignore_eos: a reply that is held to a format has to end; leave it out")
        stops = tuple(stop_ids)
        after = self._after_reasoning(demands, form, tools, stops)
        return Guide(self._course(budget, form, stops if held else (), after))

    def _course(
        self, budget: int | None, form: ReplyForm, forbidden: tuple[int, ...], after: Course | None
    ) -> Course:  # fmt: skip
        if form.reasoning:
            yield from self._reasoning(budget, forbidden, alone=after is None)
        if after is not None:
            yield from after
        while True:
            yield Free(FOREVER)

    def _reasoning(self, budget: int | None, forbidden: tuple[int, ...], *, alone: bool) -> Course:
        """Reasoning of at most ``budget`` tokens and its end. A reply that is held to a format cannot end in it.

        alone: nothing is demanded of what follows, wherever the model ends it by itself.
        """
        end = self._marker(THINK_END)
        left = FOREVER if budget is None else budget
        while left and (yield Except(forbidden) if forbidden else Free(left if alone else 1)) != end:
            left -= 1
        if not left:
            yield from self._forced(CLOSING + THINK_END)
        if forbidden or not left:
            yield from self._forced("\n\n")

    def _after_reasoning(
        self, demands: Demands, form: ReplyForm, tools: Tools | None, stops: tuple[int, ...]
    ) -> Course | None:
        """The course of the content and its calls; its grammars are made here and now."""
        if form.tools is not None or demands.call:
            self._marker(CALL), self._marker(CALL_END)
        if demands.call:
            functions = [function_of(tool) for tool in tools or ()]
            chosen = [one for one in functions if demands.function in (None, one.get("name"))]
            return self._calls(self._grammars.calls(chosen), demands.parallel, stops)
        if demands.schema is None:
            return self._one_call(stops) if not demands.parallel and form.tools is not None else None
        if not form.reasoning and not form.opens:
            raise InvalidRequestError(
                "response_format: the reply has begun already, so its format is not free any more"
            )
        grammar = self._grammars.json(demands.schema)
        return self._content(grammar, demands.parallel, form.tools is not None, stops)

    def _calls(self, grammar: Grammar, parallel: bool, stops: tuple[int, ...]) -> Course:
        newline = self._newline()
        while True:
            yield Only((self._marker(CALL),))
            yield from _held(grammar.copy(), stops)
            yield Only((self._marker(CALL_END),))
            if not parallel or (yield Only((*stops, newline))) != newline:
                break
        yield from _end(stops)

    def _one_call(self, stops: tuple[int, ...]) -> Course:
        """What the model writes, up to the end of its first call."""
        end = self._marker(CALL_END)
        while (yield Free()) != end:
            pass
        yield from _end(stops)

    def _content(self, grammar: Grammar, parallel: bool, calls: bool, stops: tuple[int, ...]) -> Course:
        """A document; or, where the model may call tools, calls in its place."""
        call = self._marker(CALL) if calls else None
        first = yield grammar.with_also(call)
        if first == call:
            if not parallel:
                yield from self._one_call(stops)
            return
        grammar.take(first)
        yield from _held(grammar, stops)
        yield from _end(stops)

    def _forced(self, text: str) -> Course:
        for id in self._tokenizer.encode(text):
            yield Only((id,))

    def _newline(self) -> int:
        return self._tokenizer.encode("\n")[0]

    def _marker(self, marker: str) -> int:
        id = self._tokenizer.id_of(marker)
        if id is None:
            raise InvalidRequestError(f"this model has no token {marker}; its replies cannot be held to demands")
        return id


def _held(grammar: Grammar, stops: tuple[int, ...]) -> Course:
    """A text of the grammar, up to where nothing more can follow, or its reader's or the model's wish to end it."""
    while not grammar.complete:
        id = yield grammar
        if id in stops:
            return
        grammar.take(id)


def _end(stops: tuple[int, ...]) -> Course:
    yield Only(stops)
