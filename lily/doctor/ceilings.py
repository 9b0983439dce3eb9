# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, through the same device and in the same minute as its kernels are measured.

read      probe_read over an arena too large for caches: bytes a second
copy      the kernel copy from one half of the arena to the other: bytes read and written a second
matrix    probe_matrix: floating-point operations a second (two for a multiply-accumulate)
level     a list of dispatches that do next to nothing, each on its own or after a barrier: seconds a dispatch
submit    a list of one such dispatch, from lily_submit until lily_wait returns: seconds

Not handled: the rate of scalar arithmetic; caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lily.checks.cases import unplanned
from lily.checks.runs import Rig
from lily.device.device import CommandList
from lily.errors import DeviceError
from lily.plan.views import Dispatch
from lily.plan.weights_map import BYTES

ARENA = 256 << 20  # bytes: more than the caches of the machines that Lily runs on
BUDGET = 0.3  # seconds for one figure, where a run is short enough
LEVELS = 256  # dispatches of a list
_BLOCK = 128 << 10  # bytes that one group of probe_read reads
_LEAST = 3  # runs behind every figure
_MOST = 50
_SUBMISSIONS = 60
_MATRIX_GROUPS = 1024  # of a GPU: some for each core, so that all have the same to do
_MATRIX_SECONDS = 0.02  # one run of probe_matrix, at least


def median_seconds(run: Callable[[], float]) -> float:
    """Median of the runs of BUDGET seconds, three at least; one before them does not count."""
    run()
    times: list[float] = []
    end = time.monotonic() + BUDGET
    while len(times) < _LEAST or (time.monotonic() < end and len(times) < _MOST):
        times.append(run())
    return statistics.median(times)


def device_seconds(rig: Rig, item: CommandList) -> Callable[[], float]:
    """Runs of a list, by the device's own clock, or by the host's where it has none."""

    def run() -> float:
        start = time.perf_counter()
        seconds = rig.seconds(item)
        return seconds if seconds > 0 else time.perf_counter() - start

    return run


def ceilings(rig: Rig) -> tuple[dict[str, Any], str | None]:
    """(all of the above, why ``rig`` cannot be used any more, if so).

    A ceiling that cannot be measured is None, its reason under ``problems``.
    """
    arena = ARENA
    found: dict[str, Any] = {"arena_bytes": arena}
    problems: dict[str, str] = {}
    figures: tuple[tuple[str, Callable[[], float]], ...] = (
        ("read_bytes_per_s", lambda: _read(rig, arena)),
        ("copy_bytes_per_s", lambda: _copy(rig, arena)),
        ("matrix_flop_per_s", lambda: _matrix(rig)),
        ("level_s", lambda: _levels(rig, dependent=True)),
        ("dispatch_s", lambda: _levels(rig, dependent=False)),
        ("submit_s", lambda: _submit(rig)),
    )
    given_up = None
    for name, measure in figures:
        found[name] = None
        if given_up is None:
            try:
                found[name] = measure()
            except DeviceError as problem:
                problems[name] = str(problem)
                given_up = rig.why_not_recovered()
    return {**found, "problems": problems}, given_up


def greatest(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The greater of two measurements of read, copy and matrix; what kernels are held against."""
    names = ("read_bytes_per_s", "copy_bytes_per_s", "matrix_flop_per_s")
    return {name: max((v[name] for v in (first, second) if v.get(name)), default=None) for name in names}


def _probe(name: str) -> Dispatch:
    return unplanned()[name]


def _read(rig: Rig, arena: int) -> float:
    groups = arena // _BLOCK
    dispatch = replace(_probe("probe_read"), params=(arena, _BLOCK), grid=(groups, 1, 1))
    words = np.arange(arena // 4, dtype=np.uint32) * np.uint32(2654435761)
    contents = {"src": words.view(np.uint8), "sums": np.zeros(4 * groups, np.uint8)}
    with rig.recorded([dispatch], [contents]) as (item, buffers):
        seconds = median_seconds(device_seconds(rig, item))
        sums = buffers["sums"].array(np.uint32, groups)
        if not np.array_equal(sums, words.reshape(groups, -1).sum(1, dtype=np.uint32)):
            raise DeviceError("probe_read added up wrongly: the figure would mean nothing")
    return arena / seconds


def _copy(rig: Rig, arena: int) -> float:
    half = arena // 2
    dispatch = replace(_probe("copy"), params=(half,), grid=(half >> 16, 1, 1))
    contents = {name: np.full(half, value, np.uint8) for name, value in (("src", 1), ("dst", 0))}
    with rig.recorded([dispatch], [contents]) as (item, _):
        return 2 * half / median_seconds(device_seconds(rig, item))


def _matrix(rig: Rig) -> float:
    """Rounds are doubled until a run is long enough to be measured."""
    groups = 8 * int(rig.device.info.get("threads", 0)) or _MATRIX_GROUPS
    act = BYTES[rig.policy.act]
    one = np.float32(1).view(np.uint32)
    side = 64 * 64
    x = np.full(side, one if act == 4 else one >> 16, np.uint32 if act == 4 else np.uint16).view(np.uint8)
    contents = {"x": x, "w": x.copy(), "y": np.zeros(4 * groups * side, np.uint8)}
    rounds = 8
    while True:
        dispatch = replace(_probe("probe_matrix"), params=(rounds,), grid=(groups, 1, 1))
        with rig.recorded([dispatch], [contents]) as (item, buffers):
            run = device_seconds(rig, item)
            run()
            if run() >= _MATRIX_SECONDS or rounds >= 1 << 16:
                seconds = median_seconds(run)
                if not (buffers["y"].array(np.float32, groups * side) == 64 * rounds).all():
                    raise DeviceError("probe_matrix multiplied wrongly: the figure would mean nothing")
                return 2 * 64 * side * rounds * groups / seconds
        rounds *= 2


def _levels(rig: Rig, dependent: bool) -> float:
    """Seconds a dispatch: all add to one word, one after the other, or each to its own, with no barrier."""
    shared = np.zeros(16, np.uint8)
    contents = [{"x": shared if dependent else np.zeros(16, np.uint8)} for _ in range(LEVELS)]
    with rig.recorded([_probe("probe_level")] * LEVELS, contents, barriers=dependent) as (item, buffers):
        runs = 0

        def run() -> float:
            nonlocal runs
            runs += 1
            return device_seconds(rig, item)()

        seconds = median_seconds(run) / LEVELS
        places, expected = (1, runs * LEVELS) if dependent else (LEVELS, runs)
        counted = buffers["x"].array(np.uint32).reshape(places, -1)[:, 0]
        if (wrong := counted[counted != expected]).size:
            raise DeviceError(
                f"{runs} lists of {LEVELS} dispatches counted to {wrong[0]} where {expected} is right: dispatches were "
                "lost or ran out of order"
            )
    return seconds


def _submit(rig: Rig) -> float:
    with rig.recorded([_probe("probe_level")], [{"x": np.zeros(16, np.uint8)}]) as (item, _):

        def run() -> float:
            start = time.perf_counter()
            rig.seconds(item)
            return time.perf_counter() - start

        return statistics.median(run() for _ in range(_SUBMISSIONS))
