# SPDX-License-Identifier: Apache-2.0
"""The examination from end to end, as one document of plain data.

Whatever fails is part of the document; nothing that a device does ends it early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from lily.doctor.machine import machine, scrub
from lily.errors import DeviceError, InvalidRequestError, LilyError

SCHEMA = "lily-doctor/1"
SIZES = ("small", "real")
MEASURED_UNTIL = 80.0  # seconds from the start; kernels after that are skipped: two minutes are the most it may take

_WRONG = "results are wrong: do not trust what this device writes, use --device cpu, and send this report"
_BROKEN = "the kernel does not run: use --device cpu, and send this report"

Say = Callable[[str], None]


def examine(
    device: str = "auto", *, quick: bool = False, threads: int | None = None, kernels: Collection[str] = (),
    sizes: Collection[str] = SIZES, say: Say = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Checks and, unless ``quick``, measures ``device``; ``kernels`` restricts to some rows of the table.

    ``ok`` of the document is whether nothing failed. ``say`` is told what is going on.
    Raises InvalidRequestError for a kernel that does not exist.
    """
    start = time.monotonic()
    document: dict[str, Any] = {"schema": SCHEMA, "quick": quick, "machine": machine()}
    problems: list[dict[str, str]] = []
    try:
        _examine_device(document, problems, device, quick, threads, kernels, sizes, say)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        text = f"the module {error.name} is missing" if missing else str(error)
        problems.append({"what": "build", "text": text, "remedy": "make build, or install the wheel for this system"})
    document |= {"problems": problems, "ok": not problems, "seconds": round(time.monotonic() - start, 1)}
    cleaned: dict[str, Any] = scrub(document)
    return cleaned


def _examine_device(
    document: dict[str, Any], problems: list[dict[str, str]], device: str, quick: bool, threads: int | None,
    kernels: Collection[str], sizes: Collection[str], say: Say,
) -> None:  # fmt: skip
    # Compiled modules may be missing; the machine is reported all the same.
    from lily.device import choose_device
    from lily.doctor import paths
    from lily.doctor.cases import reference_policy
    from lily.kernels import KERNELS
    from lily.policy import policy_for

    unknown = sorted(set(kernels) - set(KERNELS))
    if unknown:
        raise InvalidRequestError(f"there is no kernel {unknown[0]!r}; the table has {', '.join(KERNELS)}")
    name = choose_device(device)
    document["device"] = paths.chosen(device)
    try:
        with _bench(name, threads=threads, policy=policy_for(name)) as tested:
            document["device"] |= {"opened": True, **paths.opened(tested.device)}
            options = _reference_options(name, tested.device.info)
            with _bench("cpu", policy=reference_policy(tested.policy), **options) as reference:
                document["reference"] = {"name": "cpu", **reference.device.info}
                examination = _Examination(document, problems, tested, reference, kernels, say)
                examination.run(sizes, quick)
                if examination.given_up is None:  # once more: pipelines and caches are in use now
                    document["device"] |= paths.opened(tested.device)
    except DeviceError as error:
        document["device"].setdefault("opened", False)
        document["device"]["error"] = str(error)
        what = f"device {name}"
        problems.append({"what": what, "text": str(error), "remedy": paths.remedy(name, str(error))})
        return
    if not quick and not kernels:
        _generation(document, problems, name, threads, say)


@contextmanager
def _bench(name: str, policy: Any, **options: Any) -> Iterator[Any]:
    from lily.device import Device
    from lily.doctor.runs import Bench

    bench = Bench(lambda: Device(name, **{k: v for k, v in options.items() if v is not None}), policy)
    try:
        yield bench
    finally:
        bench.close()


def _reference_options(name: str, info: dict[str, Any]) -> dict[str, Any]:
    """For a GPU the fastest path of the cpu device that rounds nothing; for the cpu device its portable path."""
    from lily.device import Device

    if name == "cpu":
        return {"isa": "portable", "threads": 1 if info["isa"] == "portable" else None}
    with Device("cpu") as cpu:
        isas = str(cpu.info["isas"]).split(",")
    return {"isa": next(isa for isa in ("neon", "avx512", "avx2", "portable") if isa in isas)}


def _generation(
    document: dict[str, Any], problems: list[dict[str, str]], name: str, threads: int | None, say: Say
) -> None:
    from lily.doctor.generation import generation

    say("running the embedded model")
    try:
        document["generation"] = generation(name, threads if name == "cpu" else None)
    except LilyError as error:
        document["generation"] = {"error": str(error)}
        remedy = "use --device cpu, and send this report" if name != "cpu" else "send this report"
        problems.append({"what": "embedded model", "text": str(error), "remedy": remedy})


class _Examination:
    """Checks and measurements on an open device."""

    def __init__(
        self, document: dict[str, Any], problems: list[dict[str, str]], tested: Any, reference: Any,
        kernels: Collection[str], say: Say,
    ) -> None:  # fmt: skip
        self.document, self.problems, self.say = document, problems, say
        self.tested, self.reference, self.kernels = tested, reference, kernels
        self.rows: dict[str, dict[str, Any]] = {}  # by the case's name
        self.end = time.monotonic() + MEASURED_UNTIL
        self.given_up: str | None = None  # why the device cannot be used any more

    def run(self, sizes: Collection[str], quick: bool) -> None:
        for size in sizes:
            self.say(f"checking every kernel at its {size} shape")
            self._check(size)
        if not quick and self.given_up is None:
            self._measure()
        self.document["kernels"] = list(self.rows.values())

    def _wanted(self, kernel: str) -> bool:
        return not self.kernels or kernel in self.kernels

    def _row(self, name: str, kernel: str, variant: str = "") -> dict[str, Any]:
        return self.rows.setdefault(name, {"kernel": kernel, "variant": variant, "checks": {}})

    def _problem(self, what: str, text: str, remedy: str) -> None:
        self.problems.append({"what": what, "text": text, "remedy": remedy})

    def _check(self, size: str) -> None:
        from lily.doctor.cases import SIZES, cases
        from lily.doctor.check import check, recover

        found, missing = cases(self.tested.policy.device, SIZES[size])
        for case in found:
            if not self._wanted(case.kernel):
                continue
            row = self._row(case.name, case.kernel, case.variant)
            if self.given_up is not None:
                row["checks"][size] = {"status": "skipped", "text": self.given_up}
                continue
            result = check(case, self.tested, self.reference)
            row["checks"][size] = result.document()
            if result.status in ("fail", "error"):
                remedy = _WRONG if result.status == "fail" else _BROKEN
                self._problem(f"kernel {case.name}, {size} shape", result.text, remedy)
            if result.status == "error":
                self.given_up = recover(self.tested)
        for kernel, why in missing.items():
            if self._wanted(kernel):
                self._row(kernel, kernel)["checks"][size] = {"status": "skipped", "text": why}

    def _measure(self) -> None:
        from lily.doctor.limits import greatest, limits
        from lily.doctor.measure import share

        self.say("measuring what the machine can do")
        first = limits(self.tested)
        self.say("measuring every kernel")
        self._measure_kernels()
        second = limits(self.tested) if self.given_up is None else first
        self.document["limits"] = {"before": first, "after": second, "used": greatest(first, second)}
        for what, text in {**first["problems"], **second["problems"]}.items():
            self._problem(f"limit {what}", text, "send this report")
        for row in self.rows.values():
            if row.get("rate", {}).get("status") == "measured":
                row["rate"]["share"] = share(row["rate"], self.document["limits"]["used"])

    def _measure_kernels(self) -> None:
        from lily.doctor.cases import MEASURED, cases
        from lily.doctor.check import recover
        from lily.doctor.measure import measure

        for case in cases(self.tested.policy.device, MEASURED)[0]:
            row = self.rows.get(case.name)
            # What the probes reach is in the limits.
            if row is None or case.kernel.startswith("probe_"):
                continue
            if any(check["status"] in ("fail", "error") for check in row["checks"].values()):
                row["rate"] = {"status": "skipped", "text": "its check failed"}
            elif self.given_up is not None:
                row["rate"] = {"status": "skipped", "text": self.given_up}
            elif time.monotonic() > self.end:
                row["rate"] = {"status": "skipped", "text": f"no time left {MEASURED_UNTIL:.0f} s after the start"}
            else:
                row["rate"] = measure(case, self.tested)
            if row["rate"]["status"] == "error":
                self._problem(f"kernel {case.name}, measured", row["rate"]["text"], _BROKEN)
                self.given_up = recover(self.tested)
