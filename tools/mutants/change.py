# SPDX-License-Identifier: Apache-2.0
"""One fault: a piece of a source file and what stands there instead."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """Characters [start, end) of ``file`` (relative to the checkout) become ``new``."""

    file: str
    start: int
    end: int
    new: str
    operator: str

    def applied(self, text: str) -> str:
        """``text``, which is that of the file, with the fault."""
        return text[: self.start] + self.new + text[self.end :]

    def number(self, text: str) -> int:
        """The line at which it begins, from 1."""
        return text.count("\n", 0, self.start) + 1

    def lines(self, text: str) -> tuple[str, str]:
        """The lines that it touches before and after, without indentation and line breaks: what the fault is."""
        first = text.rfind("\n", 0, self.start) + 1
        last = text.find("\n", self.end)
        last = len(text) if last < 0 else last
        after = text[first : self.start] + self.new + text[self.end : last]
        return squeezed(text[first:last]), squeezed(after)


@dataclass(frozen=True)
class Fault:
    """A planted fault: ``name`` is SUBJECT/WHAT, ``tests`` the runs of pytest that should notice, in this order."""

    name: str
    change: Change
    line: int
    before: str
    after: str
    tests: tuple[str, ...]
    why: str = ""

    @property
    def subject(self) -> str:
        return self.name.partition("/")[0]

    @property
    def written(self) -> bool:
        """Whether it stands in faults.toml and was not drawn."""
        return self.change.operator == "written"


def squeezed(text: str) -> str:
    """``text`` with single blanks only."""
    return " ".join(text.split())


def digest(*parts: object) -> str:
    """A number, in hexadecimal digits, that follows from ``parts`` alone."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
