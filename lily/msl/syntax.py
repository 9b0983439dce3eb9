# SPDX-License-Identifier: Apache-2.0
"""Brackets, lists and attributes in a sequence of tokens: what the translator and the rules for shaders share."""

from __future__ import annotations

from collections.abc import Sequence

from lily.msl.tokens import SourceError, Token

OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, frozenset(")]}")


def closing(toks: Sequence[Token], i: int) -> int:
    """Index of the bracket that closes the one at ``i``."""
    depth = 0
    for k in range(i, len(toks)):
        if toks[k].kind == "op":
            depth += (toks[k].text in OPEN) - (toks[k].text in CLOSE)
            if depth == 0:
                return k
    raise SourceError(f"{toks[i].text!r} is never closed", toks[i])


def closing_angle(toks: Sequence[Token], i: int) -> int:
    """Index of the ``>`` (or ``>>``) that closes the template list opened at ``i``."""
    depth, k = 0, i
    while k < len(toks):
        text = toks[k].text
        if text in OPEN:
            k = closing(toks, k)
        depth += (text == "<") - (text == ">") - 2 * (text == ">>")
        if depth <= 0:
            return k
        k += 1
    raise SourceError("template list is never closed", toks[i])


def is_attribute(toks: Sequence[Token], i: int) -> bool:
    return toks[i].text == "[" and i + 1 < len(toks) and toks[i + 1].text == "["


def split_commas(toks: Sequence[Token]) -> list[list[Token]]:
    """The parts between commas outside all brackets, template lists included."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for t in toks:
        if t.kind == "op":
            depth += (t.text in OPEN or t.text == "<") - (t.text in CLOSE or t.text == ">") - 2 * (t.text == ">>")
            if t.text == "," and depth == 0:
                parts.append([])
                continue
        parts[-1].append(t)
    return [p for p in parts if p]


def attributes(toks: Sequence[Token]) -> list[list[Token]]:
    """What stands between ``[[`` and ``]]`` in ``toks``, attribute by attribute."""
    found, i = [], 0
    while i < len(toks):
        if is_attribute(toks, i):
            end = closing(toks, i)
            found += split_commas(toks[i + 2 : end - 1])
            i = end
        i += 1
    return found


def without_attributes(toks: Sequence[Token]) -> list[Token]:
    out, i = [], 0
    while i < len(toks):
        if is_attribute(toks, i):
            i = closing(toks, i)
        else:
            out.append(toks[i])
        i += 1
    return out
