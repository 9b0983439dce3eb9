# SPDX-License-Identifier: Apache-2.0
"""How calls of tools are written in a reply, as patterns that can also say "not yet decided".

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value may hold anything, also tags.  So a closing tag counts only if what belongs after it follows, and so does the
beginning of a call.  What follows is looked at no further than ``MAX_AHEAD`` characters.

The four tags that are tokens of their own (``MARKERS``) are one character each here: a lone surrogate, which decoded
text never holds.  So a tag that is only spelled is not taken for the token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

THINK, THINK_END, CALL, CALL_END = MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SIGNS = {marker: chr(0xD800 + number) for number, marker in enumerate(MARKERS)}
MAX_FORM = 64
"""Spaces or newlines in a row that are taken for those of the form."""
MAX_NAME = 256
MAX_AHEAD = 1024
"""Characters that are held back at most until it is decided what they are."""

_SPACES = f"[ \\t\\r\\n]{{0,{MAX_FORM}}}"
_NAME = f"[^<>\\s][^<>\\n]{{0,{MAX_NAME - 1}}}"
_SPELLED = {sign: marker for marker, sign in SIGNS.items()}
_SIGNS = re.compile(f"[{''.join(_SPELLED)}]")


def spelled(text: str) -> str:
    """``text`` with the markers in it as text."""
    return text if text.isascii() else _SIGNS.sub(lambda found: _SPELLED[found[0]], text)


@dataclass(frozen=True)
class Syntax:
    """A regular expression, and one of all that may still become a match of it when more text comes."""

    whole: str
    begun: str

    @classmethod
    def pattern(cls, expression: str) -> Syntax:
        """One that each character of a possible match decides, such as a class with a count."""
        return cls(f"(?:{expression})", f"(?:{expression})")

    @classmethod
    def text(cls, literal: str) -> Syntax:
        return sequence(*(cls.pattern(re.escape(char)) for char in literal))

    def __or__(self, other: Syntax) -> Syntax:
        return Syntax(f"(?:{self.whole}|{other.whole})", f"(?:{self.begun}|{other.begun})")


def sequence(*parts: Syntax) -> Syntax:
    begun = ""
    for part in reversed(parts):
        begun = f"(?:\\Z|{part.begun}{begun})"
    return Syntax("".join(part.whole for part in parts), begun)


class Ahead:
    """Whether a syntax stands at a place of a text."""

    def __init__(self, syntax: Syntax) -> None:
        self._whole, self._begun = re.compile(syntax.whole), re.compile(syntax.begun)

    def at(self, text: str, place: int) -> bool | None:
        """None while ``text`` is too short to tell."""
        if self._whole.match(text, place):
            return True
        return None if self._begun.match(text, place) else False


def _tag(kind: str) -> Syntax:
    return sequence(Syntax.text(f"<{kind}="), Syntax.pattern(_NAME), Syntax.text(">"))


_spaces = Syntax.pattern(_SPACES)
_call, _call_end = Syntax.pattern(SIGNS[CALL]), Syntax.pattern(SIGNS[CALL_END])
_function, _parameter = _tag("function"), _tag("parameter")
_function_close, _parameter_close = Syntax.text("</function>"), Syntax.text("</parameter>")
_end = {True: Syntax(r"\Z", r"\Z"), False: Syntax("(?!)", "(?!)")}  # of the reply, by whether that is where it ends
_second = sequence(_function, _spaces, _parameter | _function_close)  # another one inside the same <tool_call>


def _function_end(at_end: bool) -> Syntax:
    return sequence(_function_close, _spaces, _call_end | _call | _second | _end[at_end])


def _body(at_end: bool) -> Syntax:
    """What stands after the name of a function, or after a value."""
    return _parameter | _function_end(at_end) | _call_end


def _value_end(at_end: bool) -> Syntax:
    closed = sequence(_parameter_close, _spaces, _body(at_end) | _end[at_end])
    forgotten = _function_end(at_end) | sequence(_call_end, _spaces, _end[at_end])
    return sequence(Syntax.pattern(r"\n?"), closed | forgotten)


def _begin(at_end: bool) -> Syntax:
    return sequence(_call, _spaces, _function, _spaces, _body(at_end))


BEGIN = {at_end: Ahead(_begin(at_end)) for at_end in (False, True)}
"""A call; by whether the text ends there for good."""
VALUE_END = {at_end: Ahead(_value_end(at_end)) for at_end in (False, True)}
"""What ends a value, the newline before it included."""

HEAD = re.compile(f"{SIGNS[CALL]}{_SPACES}<function=({_NAME})>{_SPACES}")
SECOND = Ahead(_second)
SECOND_HEAD = re.compile(f"<function=({_NAME})>{_SPACES}(?=<parameter={_NAME}>|</function>)")
PARAMETER = re.compile(f"<parameter=({_NAME})>")
PARAMETER_CLOSE = re.compile(f"\\n?(?:</parameter>{_SPACES})?")
FUNCTION_CLOSE = re.compile(f"</function>{_SPACES}")
_CANDIDATE = Syntax.text("</parameter>") | Syntax.text("</function>") | _call_end
POSSIBLE_END = re.compile(f"\\n?{_CANDIDATE.begun}|\\n\\Z")
"""Where the end of a value may be, also where it may only have begun."""
