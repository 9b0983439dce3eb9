# SPDX-License-Identifier: Apache-2.0
"""Which lines of shaders/ the checked runs of this test session have executed, and whether they are enough.

Every statement of a shader sets a byte of its library when a checked kernel runs it (lily/msl/host.py).  A line counts
as covered if any statement that begins on it ran, in any kernel, with any constants, from single kernels and from whole
models alike.  conftest.py prints ``Coverage.lines()`` and lets a whole run fail below MINIMUM.
Several processes may share the tests: each tells what it has seen (``of_session``), the first one adds it up.
Not handled: unchecked runs, branches inside an expression.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest
from msl_build import CACHE, loaded_libraries, shader_source, translation
from paths import TESTS

UNCOVERED = CACHE / "uncovered.txt"
VERSIONS = (320, 400)
MINIMUM = 0.95  # of all lines, in a run of all tests

Lines = dict[str, set[int]]


def executed_lines() -> Lines:
    """Lines that ran, by file."""
    lines: Lines = defaultdict(set)
    for library in loaded_libraries():
        if library.statements:
            ran = (ctypes.c_uint8 * len(library.statements)).in_dll(library.handle, "msl_covered")
            for (file, line), seen in zip(library.statements, ran, strict=True):
                if seen:
                    lines[file].add(line)
    return lines


def all_lines() -> Lines:
    """Lines with statements of every shader file, in both language versions."""
    lines: Lines = defaultdict(set)
    for version in VERSIONS:
        for chunk in translation(shader_source(), version, True).chunks:
            for t in chunk.tokens:
                if t.kind == "mark":
                    lines[t.file].add(t.line)
    return lines


@dataclass(frozen=True)
class Coverage:
    """Lines with statements, and those of them that ran, by shader file."""

    wanted: Lines
    ran: Lines

    @property
    def share(self) -> float:
        """Of all lines, those that ran."""
        return sum(map(len, self.ran.values())) / sum(map(len, self.wanted.values()))

    def lines(self, table: bool) -> list[str]:
        """What to print at the end of a session."""
        total, seen = (sum(map(len, lines.values())) for lines in (self.wanted, self.ran))
        head = f"line coverage of shaders/: {self.share:.1%} ({seen} of {total}; others: build/msl/{UNCOVERED.name})"
        files = [
            f"{len(self.ran[file]) / len(lines):7.1%}  {len(self.ran[file]):4} of {len(lines):4}  {file}"
            for file, lines in sorted(self.wanted.items())
        ]
        return [head, *(files if table else [])]

    def write_uncovered(self) -> None:
        """Lists the lines that did not run, for who wants to test them."""
        missing = [f"{f}:{n}\n" for f, lines in sorted(self.wanted.items()) for n in sorted(lines - self.ran[f])]
        UNCOVERED.parent.mkdir(parents=True, exist_ok=True)
        UNCOVERED.write_text("".join(missing))


class Part(TypedDict):
    """What one process has seen, in plain types that go from one to another."""

    ran: dict[str, list[int]]
    whole: bool


def of_session(session: pytest.Session) -> Part:
    """What the tests of this process ran."""
    return {"ran": {file: sorted(lines) for file, lines in executed_lines().items()}, "whole": is_whole(session)}


def measured(parts: Sequence[Part]) -> Coverage | None:
    """The coverage of all processes together; None if they ran no checked kernel of shaders/."""
    executed: Lines = defaultdict(set)
    for part in parts:
        for file, numbers in part["ran"].items():
            executed[file].update(numbers)
    if not executed:
        return None
    shaders = {file: lines for file, lines in all_lines().items() if Path(file).suffix in (".metal", ".h") and lines}
    ran = {file: lines & executed.get(file, set()) for file, lines in shaders.items()}
    return Coverage(shaders, ran) if any(ran.values()) else None


def is_whole(session: pytest.Session) -> bool:
    """Whether the session has all tests of the shaders and runs to its end; only then a low coverage says anything."""
    config = session.config
    chosen = any(config.getoption(name, None) for name in ("keyword", "deselect", "lf", "stepwise"))
    chosen |= config.getoption("markexpr", "") not in ("", "not full")
    folders = all(Path(config.invocation_params.dir, a).is_dir() for a in config.args)
    wanted = {p.name for p in [*TESTS.glob("shaders/test_shaders_*.py"), TESTS / "shaders" / "test_emulated_models.py"]}
    collected = {item.path.name for item in session.items}
    return folders and not chosen and not session.shouldstop and not session.shouldfail and wanted <= collected
