# SPDX-License-Identifier: Apache-2.0
"""Places of C, Objective-C, Metal and Cython sources where an operator can plant a fault, found line by line.

Left alone: comments, strings, preprocessor lines, static assertions, prefetches. Relies on the layout of clang-format:
blanks stand around binary operators and not around the brackets of a template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.mutants.change import Change

_HIDDEN = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/                      # comments
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'  # strings
    | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*          # preprocessor lines
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_HIDDEN_PYX = re.compile(r'"""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|\#[^\n]*')
_SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARISON = re.compile(r"(?<= )(<=|>=|==|!=|<|>)(?= )")
_ONE = re.compile(r" [+-] 1u?(?![\w.])")
_FROM_ZERO = re.compile(r"(?<=\bfor \()(?:const )?[\w ]*\w = (0)(?=[;,])")
_BARRIER = re.compile(r"\w*barrier\w*\([^;]*\);|\[[^;]*[bB]arrier[^;]*\];")
_PLACE = r"\*?[A-Za-z_][\w.]*(?:->\w+|\.\w+|\[[^\]=]*\])*"
_STATEMENT = re.compile(
    rf"(?:{_PLACE} (?:[-+*/|&^]|<<|>>)?= [^=].*|[A-Za-z_]\w*\(.*\)|{_PLACE}(?:\+\+|--)|(?:\+\+|--){_PLACE}|\[.*\]);"
)
_KEPT = re.compile(r"_assert|_Static_assert|prefetch|^\s*(?:return|case|default|goto|break|continue|typedef|using)\b")
_FOREIGN = re.compile(r"(?<!!)\b(TILE_AMX|__AMX\w*|__APPLE__|__aarch64__|__ARM\w*|NEON)\b")
_BEFORE_STATEMENT = (";", "{", "}", ":", ")", "else", "do", "")


def c_places(file: str, text: str) -> list[Change]:
    """All faults that the operators can plant in ``text``."""
    pyx = file.endswith(".pyx")
    masked = _HIDDEN_PYX.sub(_blank, text) if pyx else _without_foreign(text, _HIDDEN.sub(_blank, text))
    found: list[Change] = []
    at, before = 0, ""
    for line in masked.splitlines(keepends=True):
        if not _KEPT.search(line):
            found += _expressions(file, line, at)
            if not pyx and before.endswith(_BEFORE_STATEMENT):
                found += _statements(file, line, at)
        elif re.match(r"\s*return\b", line):
            found += _expressions(file, line, at)
        at += len(line)
        before = line.strip() or before
    return found


def _without_foreign(text: str, masked: str) -> str:
    """``masked`` without what few machines compile or can run, so that the same faults are drawn everywhere."""
    out = []
    foreign: list[bool] = []  # of each #if around a line
    for line, shown in zip(text.splitlines(keepends=True), masked.splitlines(keepends=True), strict=True):
        directive = re.match(r"\s*#\s*(if|elif|else|endif)(.*)", line)
        if directive and directive[1].startswith("if"):
            foreign.append(_FOREIGN.search(directive[2]) is not None)
        elif directive and directive[1] == "endif":
            foreign.pop()
        elif directive:
            foreign[-1] = _FOREIGN.search(directive[2]) is not None
        out.append(re.sub(r"[^\n]", " ", shown) if any(foreign) else shown)
    return "".join(out)


def _blank(match: re.Match[str]) -> str:
    """As long as what it hides, with the same line breaks."""
    return re.sub(r"[^\n]", " ", match[0])


def _expressions(file: str, line: str, at: int) -> Iterator[Change]:
    for found in _COMPARISON.finditer(line):
        yield Change(file, at + found.start(1), at + found.end(1), _SWAPPED[found[1]], "comparison")
    for found in _ONE.finditer(line):
        yield Change(file, at + found.start(), at + found.end(), "", "off-by-one")
    for found in _FROM_ZERO.finditer(line):
        yield Change(file, at + found.start(1), at + found.end(1), "1", "off-by-one")


def _statements(file: str, line: str, at: int) -> Iterator[Change]:
    start = at + len(line) - len(line.lstrip())
    end = at + len(line.rstrip())
    code = line.strip()
    if _BARRIER.fullmatch(code):
        yield Change(file, start, end, ";", "barrier")
    elif _STATEMENT.fullmatch(code) and code.count("(") == code.count(")"):
        yield Change(file, start, end, ";", "statement")
