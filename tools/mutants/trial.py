# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of one fault in a copy and says whether they noticed it."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass

from tools.mutants.change import Fault
from tools.mutants.copies import Copy, Outcome

CAUGHT, SURVIVED, EQUIVALENT, INVALID, NOT_RUN = "caught", "survived", "equivalent", "invalid", "not run"
_LONGEST = 600  # seconds of a run of tests whose time is not known; its first one in a copy compiles shaders
_PATIENCE, _GRACE = 4, 90  # a run may take so many times as long as one that passed, and so many seconds more
_DOES_NOT_COMPILE = re.compile(r"does not compile:|: error: |TranslationError")


@dataclass(frozen=True)
class Verdict:
    """What became of a fault; ``by`` is the test that failed, or the reason for another status."""

    fault: Fault
    status: str
    by: str = ""
    seconds: float = 0.0


class Trials:
    """Trials in one copy. A run of tests that fails with a fault counts only if it passes without one."""

    def __init__(self, copy: Copy, good: dict[str, bool]) -> None:
        """``good``: which runs of tests pass without a fault; all copies share it."""
        self.copy, self._good = copy, good
        self._seconds: dict[str, float] = {}  # longest time of a run of tests that passed here

    def judge(self, fault: Fault) -> Verdict:
        """Plants the fault, runs its tests until one fails, and takes it away again."""
        runs, reasons, passed, seconds = list(fault.tests), ["subjects.py names no tests for this file"], False, 0.0
        while runs:  # more than once only after tests that fail anyway
            with self.copy.planted(fault) as problem:
                if problem:
                    return Verdict(fault, INVALID, _last_line(problem))
                while runs:
                    run = runs.pop(0)
                    done = self._tests(run, self._limit(run))
                    seconds += done.seconds
                    if done.code != 0:
                        break
                    self._seconds[run] = max(done.seconds, self._seconds.get(run, 0.0))
                    passed = passed or _passed(done)
                    reasons.append(f"all its tests are skipped here: {run}")
            if done.code == 0:
                break
            by = _failed_test(done.output)
            if done.code is not None and _is_shader(fault) and _DOES_NOT_COMPILE.search(done.output):
                return Verdict(fault, INVALID, by, seconds)
            if self._passes(run):
                by = f"out of time: {run}" if done.code is None else by or _last_line(done.output)
                return Verdict(fault, CAUGHT, by, seconds)
            reasons.append(f"fails without it: {by or run}")
        return Verdict(fault, SURVIVED, "", seconds) if passed else Verdict(fault, NOT_RUN, reasons[-1])

    def _limit(self, run: str) -> float:
        """Seconds that a run may take with a fault."""
        return _PATIENCE * self._seconds[run] + _GRACE if run in self._seconds else _LONGEST

    def _passes(self, run: str) -> bool:
        """Whether a run of tests that failed passes without the fault."""
        if run not in self._good:
            done = self._tests(run, _LONGEST)
            self._good[run] = done.code == 0
            self._seconds[run] = done.seconds
        return self._good[run]

    def _tests(self, run: str, seconds: float) -> Outcome:
        variables, words = _split(run)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *words]
        return self.copy.run(command, seconds, dict(v.split("=", 1) for v in variables))


def _split(run: str) -> tuple[list[str], list[str]]:
    """Variables, and arguments of pytest."""
    words = shlex.split(run)
    first = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return words[:first], words[first:]


def _is_shader(fault: Fault) -> bool:
    """Whether tests compile what the fault is in, and not a build."""
    return not fault.change.file.startswith("lily/")


def _passed(done: Outcome) -> bool:
    return re.search(r"\b\d+ passed", done.output) is not None


def _failed_test(output: str) -> str:
    """What pytest calls it, "" if it does not say (after a crash)."""
    found = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", output, re.MULTILINE)
    return found[0].partition(" - ")[0] if found else ""


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""
