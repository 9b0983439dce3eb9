# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of one fault in a copy and says whether they noticed it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tools.mutants.change import Fault
from tools.mutants.copies import Copy, Outcome

CAUGHT, SURVIVED, EQUIVALENT, INVALID, NOT_RUN = "caught", "survived", "equivalent", "invalid", "not run"
_FIRST_SECONDS = 900  # for the first run of some tests in a copy, which may compile every shader
_PATIENCE, _GRACE = 3, 90  # later ones may take so many times as long as without a fault, and so many seconds more
_DOES_NOT_COMPILE = re.compile(r"does not compile:|: error: |untranslatable|TranslationError")


@dataclass(frozen=True)
class Verdict:
    """What became of a fault; ``by`` is the test that failed, or the reason for another status."""

    fault: Fault
    status: str
    by: str = ""
    seconds: float = 0.0


class Trials:
    """Trials in one copy. A run of tests that fails with a fault counts only if it passes without one."""

    def __init__(self, copy: Copy, usual: dict[str, Outcome]) -> None:
        """``usual``: what runs give without a fault, which all copies share."""
        self.copy, self._usual = copy, usual
        self._warm: set[str] = set()  # runs that have been made in this copy, whose shaders are therefore compiled

    def judge(self, fault: Fault) -> Verdict:
        """Plants the fault, runs its tests until one fails, and takes it away again."""
        runs = [run for run in fault.tests if run not in self._usual or self._says_something(run)]
        if not runs:
            return Verdict(fault, NOT_RUN, self._why_not(fault))
        verdict, failed = self._try(fault, runs)
        if failed and failed not in self._usual:
            self._usual[failed] = self._tests(failed, _FIRST_SECONDS)
            if not self._says_something(failed):
                return self.judge(fault)
        if verdict.status == SURVIVED:
            for run in runs:
                if run not in self._usual:
                    self._usual[run] = self._tests(run, _FIRST_SECONDS)
            if not any(map(self._says_something, runs)):
                return Verdict(fault, NOT_RUN, self._why_not(fault))
        return verdict

    def _try(self, fault: Fault, runs: Sequence[str]) -> tuple[Verdict, str]:
        """The verdict if all is well with the tests themselves, and the run that failed."""
        seconds = 0.0
        with self.copy.planted(fault) as problem:
            if problem:
                return Verdict(fault, INVALID, _last_line(problem)), ""
            for run in runs:
                done = self._tests(run, self._limit(run))
                seconds += done.seconds
                if done.code is None:
                    return Verdict(fault, CAUGHT, f"out of time: {run}", seconds), run
                if done.code:
                    by = _failed_test(done.output)
                    if not fault.change.file.endswith((".py", ".pyx")) and _DOES_NOT_COMPILE.search(done.output):
                        return Verdict(fault, INVALID, by, seconds), run
                    return Verdict(fault, CAUGHT, by or _last_line(done.output), seconds), run
        return Verdict(fault, SURVIVED, "", seconds), ""

    def _limit(self, run: str) -> float:
        """Seconds that a run may take with a fault."""
        usual = self._usual.get(run)
        if usual is None or run not in self._warm:
            return _FIRST_SECONDS
        return _PATIENCE * usual.seconds + _GRACE

    def _says_something(self, run: str) -> bool:
        """Whether a run passes without a fault, and not because everything is skipped."""
        usual = self._usual[run]
        return usual.code == 0 and re.search(r"\b\d+ passed", usual.output) is not None

    def _why_not(self, fault: Fault) -> str:
        if not fault.tests:
            return "no tests are named for this file (subjects.py)"
        run = fault.tests[0]
        usual = self._usual[run]
        if usual.code == 0:
            return f"all its tests are skipped here: {run}"
        return f"its tests fail without it: {run}: {_failed_test(usual.output) or _last_line(usual.output)}"

    def _tests(self, run: str, seconds: float) -> Outcome:
        words = shlex.split(run)
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            key, _, variables[key] = words.pop(0).partition("=")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *words]
        done = self.copy.run(command, seconds, variables)
        self._warm.add(run)
        return done


def _failed_test(output: str) -> str:
    found = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", output, re.MULTILINE)
    return found[0][:160] if found else ""


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""
