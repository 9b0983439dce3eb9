# SPDX-License-Identifier: Apache-2.0
"""Which lines of shaders/ the checked runs of this test session have executed.

Every statement of a shader sets a byte of its library when a checked kernel runs it (lily/msl/host.py).  A line counts
as covered if any statement that begins on it ran, in any kernel, with any constants.  Not handled: unchecked runs,
several test processes, branches inside an expression.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from pathlib import Path

from msl_build import CACHE, loaded_libraries, shader_source, translation

UNCOVERED = CACHE / "uncovered.txt"
VERSIONS = (320, 400)

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


def summary() -> list[str]:
    """The table to print at the end of a session, [] if no checked kernel ran; writes the uncovered lines to a file."""
    executed = executed_lines()
    wanted = all_lines() if executed else {}
    wanted = {file: lines for file, lines in wanted.items() if Path(file).suffix in (".metal", ".h") and lines}
    if not any(executed.get(file) for file in wanted):
        return []
    table, missing, seen, total = [], [], 0, 0
    for file, lines in sorted(wanted.items()):
        hit = lines & executed.get(file, set())
        seen, total = seen + len(hit), total + len(lines)
        table.append(f"{len(hit) / len(lines):7.1%}  {len(hit):4} of {len(lines):4}  {file}")
        missing += [f"{file}:{line}\n" for line in sorted(lines - hit)]
    UNCOVERED.parent.mkdir(parents=True, exist_ok=True)
    UNCOVERED.write_text("".join(missing))
    return [
        f"line coverage of shaders/: {seen / total:.1%} ({seen} of {total}; the others: build/msl/{UNCOVERED.name})",
        *table,
    ]
