# SPDX-License-Identifier: Apache-2.0
"""A chat's reply, split into reasoning, content and calls of tools while it is written.

Newlines that belong to the form and not to the text are dropped: after ``<think>``, around ``</think>``, before a call.
Text that merely mentions the tags stays text (call_grammar.py says what makes a call).

What is taken although it is not quite the form: a ``<think>`` at the beginning of a reply that was to begin without; a
forgotten ``</parameter>``, ``</function>`` or ``</tool_call>`` where what follows leaves no doubt; no newlines around a
value; a second function inside one ``<tool_call>``; a tag left open at the end of a reply that was not cut off.

Not handled: a ``</parameter>`` forgotten before the next parameter, whose tag is part of the value then, since values
may hold such tags and a wrong value is worse than one that is refused; calls inside of reasoning, which are text;
control tokens (the caller hides them); stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily.text import call_grammar as grammar
from lily.text.call_arguments import Arguments, parameter_types
from lily.text.template import last_turn

_TAG = re.compile(f"{grammar.THINK}|{grammar.THINK_END}")
_OPEN, _CLOSE, _CALL, _CALL_END = (grammar.SIGNS[marker] for marker in grammar.MARKERS)
_NEWLINES = f"\\n{{1,{grammar.MAX_FORM}}}\\Z"
_REASONING_END = re.compile(f"\\n{{0,{grammar.MAX_FORM}}}{_CLOSE}|{_NEWLINES}")
_POSSIBLE_CALL = re.compile(f"\\n{{0,{grammar.MAX_FORM}}}{_CALL}|{_NEWLINES}")


@dataclass(frozen=True)
class ReplyForm:
    """What a reply to one rendered chat begins with, and what it may call.

    reasoning: it begins inside of ``<think>``. fresh: nothing but newlines is between the tag before and the reply.
    opens: nothing of the reply is in the prompt, so that ``<think>`` may still begin it.
    tools: the parameters' JSON types of each tool by name; None where there are no tools, and calls are text.
    """

    reasoning: bool = False
    fresh: bool = False
    opens: bool = True
    tools: Mapping[str, Mapping[str, frozenset[str]]] | None = None

    @classmethod
    def of(cls, prompt: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ReplyForm:
        """prompt: a rendered chat, with what is given of the reply; its last turn is enough. tools: OpenAI's form."""
        turn = last_turn(prompt)
        types = _types_of(tools) if tools else None
        tags = list(_TAG.finditer(turn))
        if not tags:
            return cls(opens="\n" not in turn.rstrip("\n"), tools=types)  # the line of the role is all there is
        fresh = not turn[tags[-1].end() :].strip("\n")
        return cls(tags[-1][0] == grammar.THINK, fresh, fresh, types)


def _types_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    functions = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools]
    return {str(function.get("name")): parameter_types(function.get("parameters")) for function in functions}


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallPart:
    """``id`` and ``name`` come with the first part of a call; ``done`` is true for the last part of a complete one."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    done: bool = False


Part = Reasoning | Content | CallPart


class ReplyParts:
    """Splits one reply. The parts that all calls give, joined, are the same however the text is chopped.

    At most ``call_grammar.MAX_AHEAD`` characters wait for what follows them, and values that may be JSON.
    """

    def __init__(self, form: ReplyForm, call_id: Callable[[int], str], *, without_token: Collection[str] = ()) -> None:
        """call_id: from a call's index to its id. without_token: markers that the tokenizer only has as text."""
        self._tools = form.tools
        self._call_id = call_id
        self._state = self._reason if form.reasoning else self._write
        self._trim = form.fresh  # newlines that come now belong to the form
        self._opens = form.opens  # a <think> that comes now opens reasoning
        self._spelled = _SpelledMarkers(without_token) if without_token else None
        self._text = ""  # not yet given out
        self._parts: list[Part] = []
        self._has_reasoning = self._has_content = False
        self._after_call = False  # no content since
        self._opened = False  # a value's tag: a newline may follow that is not the value's
        self._calls = -1  # index of the last call
        self._arguments = Arguments({})

    @property
    def waiting(self) -> int:
        """Characters that wait for what follows them; values that may be JSON are not among them."""
        return len(self._text) + (self._spelled.waiting if self._spelled else 0)

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, or the tag that ends it."""
        return self._state == self._reason

    def push(self, text: str) -> list[Part]:
        """More text, with no lone surrogate in it."""
        return self._advance(self._spelled.push(text) if self._spelled else text)

    def mark(self, marker: str) -> list[Part]:
        """The token that is one of ``call_grammar.MARKERS``."""
        held = self._spelled.flush() if self._spelled else ""
        return self._advance(held + grammar.SIGNS[marker])

    def finish(self, *, ended: bool) -> list[Part]:
        """The end of the reply. ended: by the model, and not by a limit; only then may a last tag be missing.

        What a limit has left of a tag, or of the beginning of a call, is dropped.
        """
        parts = self._advance(self._spelled.flush() if self._spelled and ended else "", ended)
        rest, self._text = self._text, ""
        if self._state == self._reason:
            self._reasoning(rest)
        elif self._state == self._write and not self._after_call and _CALL not in rest:
            self._content(rest)
        return parts + self._taken()

    def _advance(self, text: str, at_end: bool = False) -> list[Part]:
        self._text += text
        while self._state(at_end):
            pass
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # ---- states: each takes what it can from the text, and says whether another state goes on
    def _reason(self, at_end: bool) -> bool:
        if self._trim:
            self._text = self._text.lstrip("\n")
            if self._text.startswith(_OPEN):  # once more, as some models do
                self._text = self._text[1:]
                return True
        text = self._text
        found = _REASONING_END.search(text)
        self._reasoning(text[: found.start()] if found else text)
        if found is None or not found[0].endswith(_CLOSE):
            self._text = found[0] if found else ""
            return False
        self._text = text[found.end() :]
        self._state, self._trim, self._opens = self._write, True, not self._has_content
        return True

    def _write(self, at_end: bool) -> bool:
        if self._trim:
            self._text = self._text.lstrip("\n")
        if self._opens and (opened := self._opening()) is not None:
            return opened
        if self._tools is None:
            self._give(self._content, len(self._text))
            return False
        place = 0
        while found := _POSSIBLE_CALL.search(self._text, place):
            if not found[0].endswith(_CALL):
                break  # newlines, and nothing after them so far
            place = found.end()
            begins = grammar.BEGIN[at_end].at(self._text, place - 1)
            if begins:
                self._give(self._content, found.start())
                self._begin_call(grammar.HEAD, len(found[0]) - 1)
                return True
            if begins is None and not at_end:
                break
        self._give(self._content, found.start() if found else len(self._text))
        return False

    def _opening(self) -> bool | None:
        """Whether the reply begins with ``<think>``; False while there is nothing but newlines, None if it does not."""
        bare = self._text.lstrip("\n")
        if bare.startswith(_OPEN):
            self._text, self._state, self._trim = bare[1:], self._reason, True
            return True
        if bare or len(self._text) > grammar.MAX_FORM:
            self._opens = False
            return None
        return False

    def _between(self, at_end: bool) -> bool:
        """Inside of a function, and not of a value: what comes is known to be one of these."""
        text = self._text
        if found := grammar.PARAMETER.match(text):
            self._text, self._state, self._opened = text[found.end() :], self._value, True
            self._call_part(self._arguments.begin(found[1].rstrip()))
            return True
        if found := grammar.FUNCTION_CLOSE.match(text):
            return self._after_function(found.end(), at_end)
        self._end_call(len(text) - len(text.removeprefix(_CALL_END)))
        return True

    def _after_function(self, place: int, at_end: bool) -> bool:
        text = self._text
        second = grammar.SECOND.at(text, place)
        if second is None and not at_end:
            return False
        self._end_call(place + text.startswith(_CALL_END, place))
        if second:
            self._begin_call(grammar.SECOND_HEAD, 0)
        return True

    def _value(self, at_end: bool) -> bool:
        if self._opened and self._text:
            self._opened, self._text = False, self._text.removeprefix("\n")
        text, place = self._text, 0
        while place < len(text) and (found := grammar.POSSIBLE_END.search(text, place)):
            place = found.start() + 1
            ends = grammar.VALUE_END[at_end].at(text, found.start())
            if ends is None and not at_end:
                self._give(self._argument, found.start())
                return False
            if ends:
                self._give(self._argument, found.start())
                self._call_part(self._arguments.end())
                self._text = grammar.PARAMETER_CLOSE.sub("", self._text, count=1)
                self._state = self._between
                return True
        self._give(self._argument, len(text))
        return False

    # ---- what is given out
    def _give(self, give: Callable[[str], None], count: int) -> None:
        """The first ``count`` characters of the text."""
        text, self._text = self._text[:count], self._text[count:]
        give(text)

    def _reasoning(self, text: str) -> None:
        if text:
            if self._trim and self._has_reasoning:
                text = "\n" + text  # of another block
            self._trim, self._has_reasoning = False, True
            self._parts.append(Reasoning(grammar.spelled(text)))

    def _content(self, text: str) -> None:
        if text:
            self._trim = self._opens = self._after_call = False
            self._has_content = True
            self._parts.append(Content(grammar.spelled(text)))

    def _argument(self, text: str) -> None:
        self._call_part(self._arguments.push(grammar.spelled(text)))

    def _call_part(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallPart(self._calls, arguments=arguments))

    def _begin_call(self, head: re.Pattern[str], place: int) -> None:
        found = head.match(self._text, place)
        assert found is not None, "a call begins where its head was seen"
        name, self._text = found[1].rstrip(), self._text[found.end() :]
        self._calls += 1
        self._arguments = Arguments((self._tools or {}).get(name, {}))
        self._parts.append(CallPart(self._calls, self._call_id(self._calls), name))
        self._state = self._between

    def _end_call(self, count: int) -> None:
        """The call is complete; ``count`` characters are its last tags."""
        self._parts.append(CallPart(self._calls, arguments=self._arguments.close(), done=True))
        self._text = self._text[count:]
        self._state, self._after_call = self._write, True
        self._trim, self._opens = not self._has_content, False


class _SpelledMarkers:
    """Puts a marker's sign where its text stands, for tokenizers that have no token for it."""

    def __init__(self, markers: Collection[str]) -> None:
        syntax = [grammar.Syntax.text(marker) for marker in sorted(markers)]
        whole, begun = "|".join(each.whole for each in syntax), "|".join(each.begun for each in syntax)
        self._whole, self._begun = re.compile(whole), re.compile(f"(?!\\Z)(?:{begun})")
        self._held = ""

    @property
    def waiting(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        text = self._whole.sub(lambda found: grammar.SIGNS[found[0]], self._held + text)
        found = self._begun.search(text)
        place = found.start() if found else len(text)
        self._held = text[place:]
        return text[:place]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
