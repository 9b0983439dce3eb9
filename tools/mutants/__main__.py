# SPDX-License-Identifier: Apache-2.0
"""The command: ``python -m tools.mutants`` (``make mutants``), from the root of the checkout.

Exit codes: 0 enough faults were caught, 1 too few or none that matter, 2 usage, or a fault that fits nowhere.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tools.mutants.change import ROOT, Fault
from tools.mutants.copies import FOLDER, Copy
from tools.mutants.faults import Stale, drawn_faults, equivalents, reason_of, written_faults
from tools.mutants.subjects import SUBJECTS
from tools.mutants.trial import CAUGHT, EQUIVALENT, INVALID, NOT_RUN, SURVIVED, Trials, Verdict

MINIMUM = 0.97  # of the faults that matter
SEED = 1


@dataclass
class Subjects:
    """The faults of one subject that are still to be tried, and how many of the drawn ones are wanted."""

    name: str
    waiting: list[Fault] = field(default_factory=list)
    spare: Iterable[Fault] = ()  # drawn faults for those that turn out not to compile


def chosen(only: Sequence[str], seed: int, more: float) -> list[Subjects]:
    """The faults of each subject; ``only``: those whose name begins with one of these."""
    written = written_faults()
    out = []
    for subject in SUBJECTS:
        drawn = drawn_faults(subject, seed)
        mine = [f for f in written if f.subject == subject.name]
        mine += islice(drawn, round(subject.drawn * more))
        if only:
            mine = [f for f in mine if f.name.startswith(tuple(only))]
        wanted_all = not only or subject.name in only
        out.append(Subjects(subject.name, mine, drawn if wanted_all else ()))
    return [s for s in out if s.waiting]


class Campaign:
    """All trials, by several threads, each with a copy of its own."""

    def __init__(self, subjects: list[Subjects]) -> None:
        self.subjects = subjects
        self.known = equivalents()
        self.verdicts: list[Verdict] = []
        self.problem = ""
        self._good: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._mine: dict[int, Subjects] = {}

    def run(self, jobs: int) -> None:
        copies = {number: Copy(number) for number in range(1, jobs + 1)}
        threads = [threading.Thread(target=self._work, args=item) for item in copies.items()]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.problem = "interrupted"
            for copy in copies.values():
                copy.stop()
            for thread in threads:
                thread.join()

    def _work(self, number: int, copy: Copy) -> None:
        problem = copy.prepare()
        if problem:
            self.problem = self.problem or f"a copy of the checkout cannot be built:\n{problem}"
            return
        trials = Trials(copy, self._good)
        while (fault := self._next(number)) is not None:
            reason = reason_of(fault, self.known)
            try:
                verdict = trials.judge(fault) if reason is None else Verdict(fault, EQUIVALENT, reason)
            except Exception as error:
                self.problem = self.problem or f"{fault.name}: {type(error).__name__}: {error}"
                raise
            if not self.problem:
                self._note(verdict)

    def _next(self, number: int) -> Fault | None:
        """One fault more; a copy keeps to a subject, whose tests it has run before, as long as that lasts."""
        with self._lock:
            mine = self._mine.get(number)
            if mine is None or not mine.waiting:
                taken = [s for n, s in self._mine.items() if n != number]
                left = [s for s in self.subjects if s.waiting]
                # Another copy's subject only when there is no other: its tests would have to be run without a fault.
                mine = next((s for s in left if s not in taken), left[0] if left else None)
            if mine is None or self.problem:
                return None
            self._mine[number] = mine
            return mine.waiting.pop(0)

    def _note(self, verdict: Verdict) -> None:
        fault = verdict.fault
        with self._lock:
            if verdict.status == INVALID and not fault.written:
                mine = next(s for s in self.subjects if s.name == fault.subject)
                mine.waiting += islice(iter(mine.spare), 1)
            self.verdicts.append(verdict)
            if verdict.status != INVALID or fault.written:
                print(row(verdict), flush=True)


def row(verdict: Verdict) -> str:
    """A line of the table."""
    fault = verdict.fault
    what = f"{fault.change.operator}: {fault.before[:70]} → {fault.after[:70]}"
    return (
        f"{verdict.status:<10} {fault.name:<34} {fault.change.file}:{fault.line}  {what}  "
        f"{verdict.seconds:.0f} s  {verdict.by[:110]}"
    )


def summary(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """The closing line, and whether enough faults were caught."""
    count = {status: sum(v.status == status for v in verdicts) for status in (CAUGHT, SURVIVED, EQUIVALENT, NOT_RUN)}
    invalid = sum(v.status == INVALID and v.fault.written for v in verdicts)
    matter = count[CAUGHT] + count[SURVIVED]
    share = count[CAUGHT] / matter if matter else 0.0
    line = (
        f"{sum(count.values()) + invalid} mutants: {count[CAUGHT]} caught, {count[EQUIVALENT]} equivalent, "
        f"{count[SURVIVED]} survived ({100 * share:.1f} % of those that matter)"
    )
    if count[NOT_RUN]:
        line += f"; {count[NOT_RUN]} could not be tried here"
    if invalid:
        line += f"; {invalid} written by hand do not compile"
    return line, share >= MINIMUM and not invalid


def document(verdicts: Sequence[Verdict], seed: int, seconds: float) -> dict[str, object]:
    """What build/mutants/results.json holds."""
    return {
        "seed": seed,
        "seconds": round(seconds),
        "closing": summary(verdicts)[0],
        "faults": [
            {
                "name": v.fault.name, "status": v.status, "by": v.by, "seconds": round(v.seconds, 1),
                "operator": v.fault.change.operator, "file": v.fault.change.file, "line": v.fault.line,
                "before": v.fault.before, "after": v.fault.after, "tests": v.fault.tests, "why": v.fault.why,
            }
            for v in verdicts
        ],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a subject, or how names begin")
    parser.add_argument("--seed", type=int, default=SEED, help=f"what is drawn follows from it [{SEED}]")
    parser.add_argument("--more", type=float, default=1.0, metavar="X", help="draw X times as many [1]")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults tried at a time [2]")
    parser.add_argument("--list", action="store_true", help="show the faults, try none")
    options = parser.parse_args(arguments)
    try:
        subjects = chosen(options.only, options.seed, options.more)
    except Stale as error:
        print(error, file=sys.stderr)
        return 2
    if not subjects:
        print(f"no fault's name begins with {' or '.join(options.only)}", file=sys.stderr)
        return 2
    if options.list:
        for fault in (f for s in subjects for f in s.waiting):
            print(f"{fault.name:<34} {fault.change.file}:{fault.line}  {fault.before} → {fault.after}")
        return 0
    # Started in the background, this process ignores Ctrl-C, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    campaign = Campaign(subjects)
    campaign.run(options.jobs)
    results = FOLDER / "results.json"
    seconds = time.monotonic() - began
    results.write_text(json.dumps(document(campaign.verdicts, options.seed, seconds), indent=1, ensure_ascii=False))
    if campaign.problem:
        print(campaign.problem, file=sys.stderr)
        return 2
    line, enough = summary(campaign.verdicts)
    print(f"\n{line}\n{seconds / 60:.0f} minutes; all of it in {results.relative_to(ROOT)}")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
