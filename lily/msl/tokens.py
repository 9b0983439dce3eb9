# SPDX-License-Identifier: Apache-2.0
"""Tokens of the Metal Shading Language (C++14 with attributes), each with the place it came from.

Not handled: trigraphs, universal character names, raw strings; shaders have none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+) | (?P<newline>\n) | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<str>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<num>\.?[0-9](?:[eEpP][+-]|[\w.])*)
  | (?P<id>[A-Za-z_]\w*)
  | (?P<op>\.\.\.|<<=|>>=|<=>|->\*|\#\#|::|->|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^=!<>]=|[-+*/%&|^=!<>?:;,.(){}\[\]~\#])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class Token:
    """``kind`` is id, num, str, op or pragma; ``space`` says whether blanks precede it, ``first`` whether a line."""

    kind: str
    text: str
    file: str = ""
    line: int = 0
    space: bool = False
    first: bool = False

    def with_text(self, text: str, kind: str | None = None) -> Token:
        return replace(self, text=text, kind=kind or self.kind)


class SourceError(Exception):
    """The source is not what this translator understands; says where and why."""

    def __init__(self, message: str, at: Token | None = None) -> None:
        super().__init__(f"{at.file}:{at.line}: {message}" if at else message)


def tokenize(text: str, file: str = "") -> list[Token]:
    """All tokens of ``text``, comments gone, continued lines joined (a token keeps its physical line)."""
    tokens: list[Token] = []
    line, space, first, position = 1, False, True, 0
    joined = text.replace("\\\r\n", "\\\n")
    while position < len(joined):
        if joined.startswith("\\\n", position):
            line, position, space = line + 1, position + 2, True
            continue
        m = _TOKEN.match(joined, position)
        if m is None:
            raise SourceError(f"unreadable character {joined[position]!r}", Token("op", "", file, line))
        kind, lexeme = m.lastgroup or "", m.group()
        position = m.end()
        if kind == "newline":
            line, first, space = line + 1, True, False
        elif kind in ("space", "comment"):
            line, space = line + lexeme.count("\n"), True
        else:
            tokens.append(Token(kind, lexeme, file, line, space, first))
            space = first = False
    return tokens


def untokenize(tokens: Iterable[Token], markers: bool = True) -> str:
    """Text of the tokens; with ``markers``, #line directives keep every token at its file and line."""
    out: list[str] = []
    file, line, fresh = "", 0, True
    previous = ""
    for t in tokens:
        moved = t.line != 0 and (t.file != file or t.line != line)
        if t.kind == "pragma" or (moved and not 0 < t.line - line < 8) or (moved and t.file != file):
            if not fresh:
                out.append("\n")
            if markers and t.line:
                out.append(f'#line {t.line} "{t.file}"\n')
            file, line, fresh = t.file or file, t.line or line, True
        elif moved:
            out.append("\n" * (t.line - line))
            line, fresh = t.line, True
        if not fresh and (t.space or _glues(previous, t.text)):
            out.append(" ")
        out.append(t.text)
        fresh, previous = False, t.text
        if t.kind == "pragma":
            out.append("\n")
            file, fresh = "", True  # the line that follows states its place again
    return "".join(out) + "\n"


def _glues(left: str, right: str) -> bool:
    """Whether two lexemes side by side would read as something else."""
    if not left or not right:
        return False
    a, b = left[-1], right[0]
    if (a.isalnum() or a == "_") and (b.isalnum() or b == "_"):
        return True
    return a + b in {"++", "--", "<<", ">>", "&&", "||", "->", "::", "//", "/*", "##"} or (
        b == "=" and a in "+-*/%&|^=!<>"
    )


def spelled(tokens: Iterable[Token]) -> str:
    """The tokens on one line, for messages and for types taken over as they are."""
    out: list[str] = []
    for t in tokens:
        if out and (t.space or t.first or _glues(out[-1], t.text)):
            out.append(" ")
        out.append(t.text)
    return "".join(out).strip()
