# SPDX-License-Identifier: Apache-2.0
"""The faults of ``make mutants``: they fit the sources, their tests exist, and the operators plant what they say.

Not handled: whether the tests notice them; that takes ``make mutants`` (tools/mutants/README.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from tools.mutants.__main__ import summary
from tools.mutants.c_places import c_places
from tools.mutants.change import Fault, squeezed
from tools.mutants.copies import Copy, Outcome
from tools.mutants.faults import Stale, drawn_faults, equivalents, written_faults
from tools.mutants.python_places import python_places
from tools.mutants.subjects import SUBJECTS
from tools.mutants.trial import CAUGHT, EQUIVALENT, INVALID, NOT_RUN, SURVIVED, Trials, Verdict

LEAST = 120


@cache
def drawn() -> list[Fault]:
    """What ``make mutants`` draws."""
    return [fault for s in SUBJECTS for fault, _ in zip(drawn_faults(s, 1), range(s.drawn), strict=False)]


def test_every_written_fault_fits_the_sources_once(repository: Path) -> None:
    """Fails where code was rewritten that a fault is about: write the same fault for the new code (README there)."""
    faults = written_faults()
    names = [fault.name for fault in faults]
    assert len(set(names)) == len(names)
    for fault in faults:
        assert fault.before != fault.after, fault.name
        assert fault.why, fault.name
        if fault.change.file.endswith(".py"):
            compile(fault.change.applied((repository / fault.change.file).read_text()), fault.name, "exec")


def test_there_are_enough_faults_and_half_of_them_are_drawn() -> None:
    written = {f.subject for f in written_faults()}
    assert written == {s.name for s in SUBJECTS} == {f.subject for f in drawn()}
    assert len(written_faults()) + len(drawn()) >= LEAST
    assert len(drawn()) >= len(written_faults())


def test_every_fault_has_tests_that_exist(repository: Path) -> None:
    for fault in [*written_faults(), *drawn()]:
        assert fault.tests, f"{fault.name}: subjects.py names no tests for {fault.change.file}"
        for run in fault.tests:
            for word in shlex.split(run):
                if word.startswith("tests/"):
                    assert (repository / word).exists(), f"{fault.name} is to be noticed by {word}, which is not there"


def test_what_is_drawn_follows_from_the_seed() -> None:
    subject = SUBJECTS[0]
    first, other = ([f.name for f, _ in zip(drawn_faults(subject, seed), range(20), strict=False)] for seed in (1, 2))
    assert [f.name for f in drawn() if f.subject == subject.name] == first[: subject.drawn]
    assert len(set(first)) == len(first)
    assert set(first) != set(other)


def test_a_fault_that_fits_nowhere_or_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "lily" / "text").mkdir(parents=True)
    (tmp_path / "lily" / "text" / "a.py").write_text("x = f(1)\ny = f(1)\nz =\n    3\n")
    table = tmp_path / "faults.toml"
    entry = "[text.{}]\nold = '{}'\nnew = ''\nwhy = 'w'\n"
    table.write_text(entry.format("gone", "g(1)") + entry.format("twice", "= f(") + entry.format("fits", "z   = 3"))
    with pytest.raises(Stale) as caught:
        written_faults(tmp_path, table)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("text/gone: 'g(1)' stands 0 times in any of lily/text/*.py")
    assert lines[1].startswith("text/twice: '= f(' stands 2 times in lily/text/a.py, expected once. Where the code was")
    table.write_text(entry.format("fits", "z   = 3"))
    [fault] = written_faults(tmp_path, table)
    assert (fault.line, fault.before, fault.after) == (3, "z = 3", "")


PYTHON = '''"""Not 1 < 2."""
LIMIT = 3
def f(x: "list[1]", y):
    """1 < 2"""
    assert x < 5
    if x is None or 0 <= y + 1 < LIMIT:
        raise ValueError(f"{y < 1}")
    self.z = g(x[1:])
    z = 4
    return x == "é" and y > 2
'''


def test_operators_of_python_plant_what_they_say() -> None:
    planted = {(*change.lines(PYTHON), change.operator) for change in python_places("a.py", PYTHON)}
    condition, last = "if x is None or 0 <= y + 1 < LIMIT:", 'return x == "é" and y > 2'
    assert planted == {
        (condition, "if x is not None or 0 <= y + 1 < LIMIT:", "comparison"),
        (condition, "if x is None or 0 < y + 1 < LIMIT:", "comparison"),
        (condition, "if x is None or 0 <= y + 1 <= LIMIT:", "comparison"),
        (condition, "if x is None or 0 <= y < LIMIT:", "off-by-one"),
        (condition, "if x is None or 1 <= y + 1 < LIMIT:", "off-by-one"),
        (condition, "if x is None or 0 <= y + 2 < LIMIT:", "off-by-one"),
        ('raise ValueError(f"{y < 1}")', "pass", "statement"),
        ("self.z = g(x[1:])", "pass", "statement"),
        ("self.z = g(x[1:])", "self.z = g(x[2:])", "off-by-one"),
        (last, 'return x != "é" and y > 2', "comparison"),
        (last, 'return x == "é" and y >= 2', "comparison"),
        (last, 'return x == "é" and y > 3', "off-by-one"),
    }


METAL = """// a < b
#define LESS(a, b) ((a) < (b)) \\
    + 1
template <uint N> inline void f(vec<float, 4> x) {
    static_assert(N < 4);
    for (uint i = 0; i < n - 1; i++) sum += x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float y = a < b;
    out[i] = y;
    say("x < y", a,
        b);
    return y == 1;
#if TILE_AMX
    amx[i] = 1;
#else
    p->n++;
#endif
}
"""


def test_operators_of_c_plant_what_they_say() -> None:
    planted = {(*change.lines(METAL), change.operator) for change in c_places("a.metal", METAL)}
    loop = "for (uint i = 0; i < n - 1; i++) sum += x[i];"
    assert planted == {
        (loop, "for (uint i = 0; i <= n - 1; i++) sum += x[i];", "comparison"),
        (loop, "for (uint i = 0; i < n; i++) sum += x[i];", "off-by-one"),
        (loop, "for (uint i = 1; i < n - 1; i++) sum += x[i];", "off-by-one"),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", ";", "barrier"),
        ("const float y = a < b;", "const float y = a <= b;", "comparison"),
        ("out[i] = y;", ";", "statement"),
        ("return y == 1;", "return y != 1;", "comparison"),
        ("p->n++;", ";", "statement"),
    }


class MadeUp:
    """A copy in which tests end as they are told, with a fault and without."""

    def __init__(self, faulty: dict[str, tuple[int | None, str]], good: dict[str, int], problem: str = "") -> None:
        self.ends: dict[bool, dict[str, tuple[int | None, str]]] = {True: faulty, False: {}}
        self.ends[False] = {key: (code, "") for key, code in good.items()}
        self.problem, self.faulty = problem, False

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[str]:
        self.faulty = True
        yield self.problem
        self.faulty = False

    def run(self, command: list[str], seconds: float, variables: dict[str, str]) -> Outcome:
        assert variables == {"LILY_DEVICE": "cpu"}
        return Outcome(*self.ends[self.faulty][command[-1]], 1.0)


FAILED = (1, "FAILED tests/b.py::test_x[a b] - assert 1 == 2\n1 failed, 1 passed")
PASSED = (0, "2 passed, 1 skipped in 3 s")
JUDGED: dict[str, tuple[MadeUp, str, str]] = {
    "second run fails": (MadeUp({"a": PASSED, "b": FAILED}, {"b": 0}), CAUGHT, "tests/b.py::test_x[a b]"),
    "no run fails": (MadeUp({"a": PASSED, "b": PASSED}, {}), SURVIVED, ""),
    "one fails anyway": (MadeUp({"a": FAILED, "b": PASSED}, {"a": 1}), SURVIVED, ""),
    "all fail anyway": (MadeUp({"a": FAILED, "b": FAILED}, {"a": 1, "b": 1}), NOT_RUN, "fails without it"),
    "all skipped": (MadeUp({"a": (0, "3 skipped"), "b": (0, "1 skipped")}, {}), NOT_RUN, "all its tests are skipped"),
    "a crash": (MadeUp({"a": (-11, "Fatal Python error"), "b": PASSED}, {"a": 0}), CAUGHT, "Fatal"),
    "no end": (MadeUp({"a": (None, "..."), "b": PASSED}, {"a": 0}), CAUGHT, "out of time: LILY_DEVICE=cpu a"),
    "no build": (MadeUp({}, {}, "error: expected ;"), INVALID, "error: expected ;"),
}  # fmt: skip


@pytest.mark.parametrize("case", JUDGED)
def test_a_fault_is_judged_by_tests_that_pass_without_it(case: str) -> None:
    copy, status, by = JUDGED[case]
    fault = replace(written_faults()[0], tests=("LILY_DEVICE=cpu a", "LILY_DEVICE=cpu b"))
    verdict = Trials(cast(Copy, copy), {}).judge(fault)
    assert (verdict.status, verdict.by[: len(by)]) == (status, by)
    assert not copy.faulty


def test_the_closing_line_counts_what_matters() -> None:
    fault = written_faults()[0]
    verdicts = [Verdict(fault, status) for status in [CAUGHT] * 97 + [SURVIVED] * 3 + [EQUIVALENT] * 5 + [NOT_RUN]]
    line, enough = summary(verdicts)
    assert line.startswith("106 mutants: 97 caught, 5 equivalent, 3 survived (97.0 % of those that matter)")
    assert line.endswith("; 1 could not be tried here")
    assert enough
    assert not summary([*verdicts, Verdict(fault, SURVIVED)])[1]
    assert not summary([])[1]


def test_every_equivalent_has_a_reason() -> None:
    assert all(reason.strip() for reason in equivalents().values())
    assert {subject for subject, _, _ in equivalents()} <= {s.name for s in SUBJECTS}


def test_every_equivalent_is_of_a_line_that_is_there(repository: Path) -> None:
    """Fails where a line was rewritten that an entry is about: look at it again, then write or remove the entry."""
    texts = {s.name: squeezed(" ".join((repository / file).read_text() for file in s.sources())) for s in SUBJECTS}
    assert [(name, old) for name, old, _ in equivalents() if old not in texts[name]] == []
