# SPDX-License-Identifier: Apache-2.0
"""The faults: those of faults.toml, written by hand, and those drawn by operators from the sources as they are.

A drawn place is chosen by the number that follows from its line and the seed, not by where it stands: a file that
moves, or a line that changes, leaves the others that are drawn as they are.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants.c_places import c_places
from tools.mutants.change import ROOT, Change, Fault, digest, squeezed
from tools.mutants.python_places import python_places
from tools.mutants.subjects import Subject, subject

HERE = Path(__file__).resolve().parent
WRITTEN = HERE / "faults.toml"
EQUIVALENT = HERE / "equivalent.toml"


class Stale(Exception):
    """A fault of faults.toml does not fit the sources any more; the message says what to do."""


# ---- written -------------------------------------------------------------------------------------------------------
def written_faults(root: Path = ROOT, file: Path = WRITTEN) -> list[Fault]:
    """The faults of faults.toml; Stale where the text of one does not stand in its subject exactly once."""
    faults, stale = [], []
    for name, entries in tomllib.loads(file.read_text()).items():
        for key, entry in entries.items():
            try:
                faults.append(_written(subject(name), f"{name}/{key}", entry, root))
            except Stale as error:
                stale.append(str(error))
    if stale:
        raise Stale("\n".join(stale))
    return faults


def _written(subject: Subject, name: str, entry: dict[str, Any], root: Path) -> Fault:
    pattern = re.compile(r"\s+".join(map(re.escape, entry["old"].split())))
    only = entry.get("file", "*")
    texts = {file: (root / file).read_text() for file in subject.sources(root) if Path(file).match(only)}
    found = [(file, m) for file, text in texts.items() for m in pattern.finditer(text)]
    if len(found) != 1:
        where = ", ".join(sorted({file for file, _ in found})) or f"any of {' '.join(subject.files)} ({only})"
        raise Stale(
            f"{name}: {entry['old']!r} stands {len(found)} times in {where}, expected once. Where the code was "
            f"rewritten, write the same fault for the new code in {WRITTEN.relative_to(ROOT)}; remove it only if the "
            "code is gone"
        )
    file, match = found[0]
    change = Change(file, match.start(), match.end(), entry["new"], "written")
    return _fault(name, change, texts[file], tuple(entry.get("tests", subject.tests_of(file))), entry["why"])


def _fault(name: str, change: Change, text: str, tests: tuple[str, ...], why: str = "") -> Fault:
    before, after = change.lines(text)
    return Fault(name, change, change.number(text), before, after, tests, why)


# ---- drawn ---------------------------------------------------------------------------------------------------------
def places(subject: Subject, root: Path = ROOT) -> Iterator[tuple[Change, str]]:
    """Everything that the operators could plant in a subject, with the text of its file."""
    for file in subject.sources(root):
        text = (root / file).read_text()
        for change in (python_places if file.endswith(".py") else c_places)(file, text):
            if change.operator in subject.operators:
                yield change, text


def drawn_faults(subject: Subject, seed: int, root: Path = ROOT) -> Iterator[Fault]:
    """A subject's faults in the order in which they are drawn, the operators in turn, at most one of each line.

    Without end as far as there are places: who draws takes as many as it needs, and more for those that do not compile.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    pools: dict[str, list[tuple[str, Fault]]] = {operator: [] for operator in subject.operators}
    for change, text in places(subject, root):
        before, after = change.lines(text)
        key = (change.operator, before, after)
        order = digest(seed, subject.name, *key, seen[key])
        seen[key] += 1
        name = f"{subject.name}/{order[:6]}"
        pools[change.operator].append((order, _fault(name, change, text, subject.tests_of(change.file))))
    for pool in pools.values():
        pool.sort(key=lambda item: item[0], reverse=True)
    lines: set[tuple[str, int]] = set()
    while any(pools.values()):
        for operator in subject.operators:
            while pools[operator]:
                fault = pools[operator].pop()[1]
                if (fault.change.file, fault.line) not in lines:
                    lines.add((fault.change.file, fault.line))
                    yield fault
                    break


# ---- equivalent ----------------------------------------------------------------------------------------------------
def equivalents(file: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """(subject, line before, line after) → why nothing can tell the two apart."""
    return {
        (name, squeezed(entry["old"]), squeezed(entry["new"])): entry["reason"]
        for name, entries in tomllib.loads(file.read_text()).items()
        for entry in entries
    }


def reason_of(fault: Fault, known: dict[tuple[str, str, str], str]) -> str | None:
    """Why ``fault`` is equivalent to what stands there, None if it is not known to be."""
    return known.get((fault.subject, fault.before, fault.after))
