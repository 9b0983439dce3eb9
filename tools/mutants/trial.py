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
_FIRST_SECONDS = 900  # for tests of the unchanged copy, which may compile every shader
_PATIENCE, _GRACE = 5, 90  # a run with a fault may take so many times as long, and so many seconds more
_DOES_NOT_COMPILE = re.compile(r"does not compile:|: error: |untranslatable|TranslationError")


@dataclass(frozen=True)
class Verdict:
    """What became of a fault; ``by`` is the test that failed, or the reason for another status."""

    fault: Fault
    status: str
    by: str = ""
    seconds: float = 0.0


class Trials:
    """Trials in one copy. Each run of tests is made once without a fault before it counts."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._usual: dict[str, Outcome] = {}

    def judge(self, fault: Fault) -> Verdict:
        """Plants the fault, runs its tests until one fails, and takes it away again."""
        runs = [run for run in fault.tests if self._passes(run)]
        if not runs:
            return Verdict(fault, NOT_RUN, self._why_not(fault))
        seconds = 0.0
        with self.copy.planted(fault) as problem:
            if problem:
                return Verdict(fault, INVALID, _last_line(problem))
            for run in runs:
                usual = self._usual[run].seconds
                done = self._tests(run, _PATIENCE * usual + _GRACE)
                seconds += done.seconds
                if done.code is None:
                    return Verdict(fault, CAUGHT, f"out of time: {run}", seconds)
                if done.code:
                    by = _failed_test(done.output)
                    if not fault.change.file.endswith((".py", ".pyx")) and _DOES_NOT_COMPILE.search(done.output):
                        return Verdict(fault, INVALID, by, seconds)
                    return Verdict(fault, CAUGHT, by or _last_line(done.output), seconds)
        return Verdict(fault, SURVIVED, "", seconds)

    def _passes(self, run: str) -> bool:
        """Whether a run of tests passes, and says something, without a fault."""
        if run not in self._usual:
            self._usual[run] = first = self._tests(run, _FIRST_SECONDS)
            if first.code == 0 and first.seconds > 20:  # it may have compiled: how long does it take now?
                self._usual[run] = self._tests(run, _FIRST_SECONDS)
        usual = self._usual[run]
        return usual.code == 0 and re.search(r"\b\d+ passed", usual.output) is not None

    def _why_not(self, fault: Fault) -> str:
        run = fault.tests[0] if fault.tests else ""
        usual = self._usual.get(run)
        if usual is None:
            return "no tests are named for this file (subjects.py)"
        skipped = re.search(r"\b\d+ skipped\b", usual.output) if usual.code == 0 else None
        if skipped:
            return f"all its tests are skipped here: {run}"
        return f"its tests fail without it: {run}: {_failed_test(usual.output) or _last_line(usual.output)}"

    def _tests(self, run: str, seconds: float) -> Outcome:
        words = shlex.split(run)
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            key, _, variables[key] = words.pop(0).partition("=")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *words]
        return self.copy.run(command, seconds, variables)


def _failed_test(output: str) -> str:
    found = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", output, re.MULTILINE)
    return found[0][:160] if found else ""


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""
