# SPDX-License-Identifier: Apache-2.0
"""The parts of an examination: a device and its reference, checks, measurements, the embedded model.

What fails is written down, and the next part begins; after a submission that never ends the device is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from typing import Any

from lily.checks.cases import MEASURED, SIZES, Case, cases, reference_policy
from lily.checks.check import check
from lily.checks.runs import Rig
from lily.checks.tensor_check import open_checked
from lily.device.device import Device
from lily.device.kinds import choose_device, kind_of
from lily.device.pipelines import compile_pipelines, pipelines_of
from lily.doctor import paths
from lily.doctor.ceilings import ceilings, greatest
from lily.doctor.generation import generation
from lily.doctor.measure import measure, share
from lily.errors import DeviceError, LilyError
from lily.policy import policy_for

MEASURED_UNTIL = 80.0  # seconds from the start; kernels after that are skipped: two minutes are the most it may take

_SEND = "send this report"
_REFERENCE = f"nothing is known of the device under test: {_SEND}"
_SPARED = (
    f"Lily runs without tensor operations here, see tensor_check: {_SEND}, and that of "
    "`LILY_METAL=msl=3.2 lily doctor --json`"
)


class Examiner:
    """Writes what it finds into ``document``."""

    tested: Rig

    def __init__(
        self, document: dict[str, Any], device: str, threads: int | None, kernels: Collection[str],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.document, self.kernels, self.say = document, kernels, say
        self.name = choose_device(device)
        self.kind = kind_of(self.name)
        self.threads = threads if self.kind.threads else None
        self.options: dict[str, Any] = self.kind.options(threads)
        document["device"] = self.device = paths.chosen(device)
        self.rows: dict[str, dict[str, Any]] = {}  # by the case's name
        self.end = time.monotonic() + MEASURED_UNTIL
        self.given_up: str | None = None  # why the device cannot be used any more
        self.unchecked: str | None = None  # why the reference cannot be used

    def run(self, sizes: Collection[str] | None, quick: bool) -> None:
        """All parts; ``quick`` leaves out what measures, ``sizes`` are all without it."""
        try:
            with closing(Rig(lambda: Device(self.name, **self.options), policy_for(self.name))) as self.tested:
                self.device |= {"opened": True, **paths.opened(self.tested.device)}
                self._check(SIZES if sizes is None else sizes)
                if not quick and self.given_up is None:
                    self._measure()
                if self.given_up is None:  # once more: pipelines and caches are in use now
                    self.device |= paths.opened(self.tested.device)
        except DeviceError as error:
            self.device.setdefault("opened", False)
            self.given_up = self.device["error"] = error.full
            self._problem(f"device {self.name}", error.full, paths.remedy(self.name, error.full))
        finally:
            self.document["kernels"] = list(self.rows.values())
        if not quick and not self.kernels and self.given_up is None:
            self._generate()

    def _problem(self, what: str, text: str, remedy: str) -> None:
        self.document["problems"].append({"what": what, "text": text, "remedy": remedy})

    def _instead(self) -> str:
        """What a user may do until it is mended."""
        if self.kind.gpu:
            return f"use --device cpu, and {_SEND}"
        return _SEND if self.device["info"]["isa"] == "portable" else f"set LILY_CPU=portable, and {_SEND}"

    # ---- checks
    def _check(self, sizes: Collection[str]) -> None:
        if self.device["info"].get("matrix") == "tensor":
            self.device["tensor_check"] = self._tensor_check()
            if self.device["tensor_check"] != "passed":
                self._problem("tensor operations", self.device["tensor_check"], _SPARED)
        chosen = {size: [case for case in cases(self.name, SIZES[size]) if self._wants(case)] for size in sizes}
        with suppress(DeviceError):  # several at a time; what fails is told by the check of that kernel
            compile_pipelines(self.tested.device, pipelines_of(c.tested for found in chosen.values() for c in found))
        reference = self._open_reference()
        try:
            for size, found in chosen.items():
                self.say(f"checking every kernel at its {size} shape")
                for case in found:
                    self._check_case(case, size, reference)
        finally:
            if reference is not None:
                reference.close()

    def _wants(self, case: Case) -> bool:
        return not self.kernels or case.kernel in self.kernels

    def _tensor_check(self) -> str:
        """What an engine would say of this device's tensor operations."""
        try:
            with open_checked(self.name) as device:
                return str(device.info.get("tensor_check"))
        except DeviceError as error:
            return f"failed, and without them the device does not open: {error}"

    def _open_reference(self) -> Rig | None:
        """For a GPU the fastest path of the cpu device that rounds nothing; for the cpu device its portable path."""
        try:
            options: dict[str, Any]
            if not self.kind.gpu:
                options = {"isa": "portable", "threads": 1 if self.device["info"]["isa"] == "portable" else None}
            else:
                with Device("cpu") as cpu:
                    isas = str(cpu.info["isas"]).split(",")
                options = {"isa": next(isa for isa in ("neon", "avx512", "avx2", "portable") if isa in isas)}
            reference = Rig(lambda: Device("cpu", **options), reference_policy(self.tested.policy))
        except DeviceError as error:
            self._problem("reference, the cpu device", str(error), _REFERENCE)
            self.unchecked = f"there is no reference: {error}"
            return None
        self.document["reference"] = {"name": "cpu", **reference.device.info}
        return reference

    def _check_case(self, case: Case, size: str, reference: Rig | None) -> None:
        row = self.rows.setdefault(case.name, {"kernel": case.kernel, "variant": case.variant, "checks": {}})
        why = self.given_up or self.unchecked
        if reference is None or why is not None:
            row["checks"][size] = {"status": "skipped", "text": why}
            return
        result = check(case, self.tested, reference)
        row["checks"][size] = result.document()
        if result.status in ("fail", "error"):
            blamed = result.failed is reference
            remedy = _REFERENCE if blamed else self._remedy(case, result.status)
            self._problem(f"kernel {case.name}, {size} shape", result.text, remedy)
        if result.failed is reference:
            why = reference.why_not_recovered()
            self.unchecked = why and f"on the reference device: {why}"
        elif result.failed is not None:
            self.given_up = self.tested.why_not_recovered()

    def _remedy(self, case: Case, status: str) -> str:
        if case.tested.kernel.matrix and self.device.get("tensor_check", "passed") != "passed":
            return _SPARED
        what = "results are wrong: do not trust what this device writes" if status == "fail" else "it does not run"
        return f"{what}; {self._instead()}"

    # ---- measurements
    def _measure(self) -> None:
        self.say("measuring what the machine can do")
        first, self.given_up = ceilings(self.tested)
        self.say("measuring every kernel")
        for case in cases(self.name, MEASURED):
            # What the probes reach is in the ceilings.
            if case.name in self.rows and not case.kernel.startswith("probe_"):
                self._measure_case(case, self.rows[case.name])
        second = first
        if self.given_up is None:
            second, self.given_up = ceilings(self.tested)
        used = greatest(first, second)
        self.document["ceilings"] = {"before": first, "after": second, "used": used}
        for what, text in {**first["problems"], **second["problems"]}.items():
            self._problem(f"ceiling {what}", text, _SEND)
        for row in self.rows.values():
            if row.get("rate", {}).get("status") == "measured":
                row["rate"]["share"] = share(row["rate"], used)

    def _measure_case(self, case: Case, row: dict[str, Any]) -> None:
        why = self.given_up
        if any(check["status"] in ("fail", "error") for check in row["checks"].values()):
            why = "its check failed"
        elif why is None and time.monotonic() > self.end:
            why = f"no time left {MEASURED_UNTIL:.0f} s after the start"
        row["rate"] = {"status": "skipped", "text": why} if why else measure(case, self.tested)
        if row["rate"]["status"] == "error":
            self._problem(f"kernel {case.name}, measured", row["rate"]["text"], self._remedy(case, "error"))
            self.given_up = self.tested.why_not_recovered()

    def _generate(self) -> None:
        self.say("running the embedded model")
        try:
            self.document["generation"] = generation(self.name, self.threads)
        except LilyError as error:
            self.document["generation"] = {"error": str(error)}
            self._problem("embedded model", str(error), self._instead())
