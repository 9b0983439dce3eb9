# SPDX-License-Identifier: Apache-2.0
"""Runs the Metal kernels of shaders/ on numpy arrays: the harness of all shader tests.

    from msl_harness import run, bf16, step

    out = run(
        "gemv_norm",                                   # row of lily/kernels.py = name of the kernel in shaders/
        {"x": bf16(x), "norm": norm, "w": packed, "y": bf16(np.empty(n))},   # every argument of the row, by name
        params={"n": n, "k": k, "eps": 1e-6, "rows_per_group": 8},           # every parameter
        constants={"bits": 4, "group": 64},                                  # every constant
        grid=(n // 8,), threads=(64,),                 # threadgroups, threads of one
        order="random", seed=3,                        # forward | reverse | random: order of lanes, simdgroups, groups
        checked=True,                                  # races, bounds, divergence … (tests/emulator/README.md)
    )
    out["y"]                                           # written arguments (w and rw), new arrays; inputs stay
    out.bytes_read, out.bytes_written                  # all bytes moved, and (checked) each byte once:
    out.distinct_read, out.distinct_written

* Two backends, chosen by LILY_SHADERS: ``emulator``, on the CPU, with all options; ``device``, the default on a Mac, is
  the library of the metal device, on the GPU (msl_device.py).  The device ignores ``order``, ``seed``, ``workers`` and
  ``checked``, and skips the test where it gives a source of its own or looks at bytes moved.  ``needs_shaders`` skips
  where neither is at hand, ``needs_emulator`` where every access must be checked, or the emulator is the subject.
* Arrays: ``act`` and ``bf16`` arguments are ml_dtypes.bfloat16 (``act`` is float32 with act="f32"), ``f32 i32 u32``
  as they say, ``q qrows u8`` any bytes (layout "rows" of lily/weights.py), ``Step Request Output`` structured arrays
  (``step()``, ``request()`` of kernel_harness).  Shapes are free; the harness checks dtypes.
* One array object under two names is one buffer.  Arguments that are only written are filled with 0xFF bytes (NaN)
  before the kernel runs; ``poison=None`` leaves what the array holds.
* A report of the checked build, a write outside an argument or to a read-only one raises EmulatorError, an
  AssertionError that lists what was found.
* ``metal=400`` compiles with MSL 4 and tensor operations (default 320); ``source=text`` takes kernels from a string in
  place of shaders/, for the tests of the harness itself.
* ``run_many([Call(...), ...])`` runs several dispatches one after the other in one memory; ``barrier=False`` on a call
  says that no barrier stands before it: hazards with the dispatches since the last one are then reported.
* Compiled kernels are cached in build/msl by the hash of their source; the first use of a kernel costs 1–2 seconds.

Not handled: whole plans (metal/engine.py), speed.  The emulator needs Linux and a clang (msl_compiler.py).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_calls import Array, Call, RunCall, check_names
from kernel_harness import request, step
from msl_build import Library, kernel_library, located, runtime, translation
from msl_compiler import MISSING, compiler

from lily.device.device import pack_params
from lily.kernels import KERNELS
from lily.msl.flatten import constant_name
from lily.msl.preprocess import Resolver

HOST_THREADS = 2 if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1" else 1
"""On which the emulator runs the threadgroups of a whole model's dispatch: each process has a core, or both."""

__all__ = [
    "ORDERS", "SLACK", "Array", "Call", "EmulatorError", "Run", "backend", "bf16", "matrix_operands", "needs_clang",
    "needs_emulator", "needs_shaders", "request", "run", "run_call", "run_many", "same_result",
    "step",
]  # fmt: skip

_ORDERS = {"forward": 0, "reverse": 1, "random": 2}
CHECK, LAX, RANDOM_LAYOUT = 1, 2, 4
BUFFERS = 31
BUFFER = 1  # kind of an argument in msl_bind.h
GUARD = 4096  # bytes around every buffer in an unchecked run
_GUARD_BYTE = 0xA5


def backend() -> str:
    """``emulator`` or ``device``."""
    chosen = os.environ.get("LILY_SHADERS") or ("device" if sys.platform == "darwin" else "emulator")
    if chosen not in ("emulator", "device"):
        raise ValueError(f"LILY_SHADERS is {chosen!r}; allowed: emulator, device")
    return chosen


# Orders of lanes, simdgroups and groups that tests go through; a device has its own.
ORDERS = tuple(_ORDERS) if backend() == "emulator" else ("forward",)

# How much less exact float32 results may be than on the emulator, whose host computes functions and divisions to within
# one unit in the last place: in relaxed math Metal promises four for precise functions and two and a half for a
# division, and may reassociate sums.  Tests multiply the tolerances that are that tight with it.
SLACK = 4.0 if backend() == "device" and sys.platform == "darwin" else 1.0

needs_clang = pytest.mark.skipif(compiler() is None, reason=MISSING)
needs_shaders = [needs_clang] if backend() == "emulator" else []  # for pytestmark
needs_emulator = needs_clang if backend() == "emulator" else pytest.mark.skip("only the emulator checks every access")


class EmulatorError(AssertionError):
    """What a kernel did wrong; ``reports`` has one line for each kind and place."""

    def __init__(self, kernel: str, reports: Sequence[str]) -> None:
        super().__init__(f"{kernel}:\n  " + "\n  ".join(reports))
        self.reports = list(reports)


class Launch(ctypes.Structure):
    """MslLaunch of tests/emulator/msl_runtime.h."""

    _fields_ = (
        ("buffers", ctypes.c_void_p * BUFFERS), ("bytes", ctypes.c_uint64 * BUFFERS),
        ("threadgroup_bytes", ctypes.c_uint32 * BUFFERS), ("grid", ctypes.c_uint32 * 3),
        ("groups", ctypes.c_uint32 * 3), ("group_size", ctypes.c_uint32 * 3), ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("workers", ctypes.c_uint32), ("name", ctypes.c_char_p),
    )  # fmt: skip


# Told of every run on the emulator without reports: (calls, results, options).  Set by nvidia/record.py.
recorder: Callable[[Sequence[Call], Sequence[Run], Mapping[str, Any]], None] | None = None


@dataclass
class Run:
    """What a dispatch left: written arrays by argument name, and how many bytes it moved (on the emulator)."""

    arrays: dict[str, Array]
    reports: list[str] = field(default_factory=list)
    counts: tuple[int, ...] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def _count(self, index: int) -> int:
        if self.counts is None:
            pytest.skip("a device does not count the bytes that it moves")
        return self.counts[index]

    bytes_read = property(lambda self: self._count(0))
    bytes_written = property(lambda self: self._count(1))
    distinct_read = property(lambda self: self._count(2))
    distinct_written = property(lambda self: self._count(3))


def same_result(got: Array, want: Array) -> bool:
    """Whether two specialisations of a kernel computed the same: the same bits, up to the order of sums on a GPU."""
    if SLACK == 1:
        return got.shape == want.shape and got.tobytes() == want.tobytes()
    last_place = 2.0**-7 if got.dtype == ml_dtypes.bfloat16 else 2.0**-17
    a, b = got.astype(np.float64), want.astype(np.float64)
    return bool(np.allclose(a, b, rtol=last_place, atol=last_place / 8, equal_nan=True))


@pytest.fixture(name="run_call")
def run_call_fixture() -> RunCall:
    """For tests that CPU kernels and shaders share."""
    return run_call


@pytest.fixture(name="slack")
def slack_fixture() -> float:
    return SLACK


def bf16(values: Any) -> Array:
    """``values`` rounded to bfloat16."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


def run(
    kernel: str,
    arrays: Mapping[str, Array],
    params: Mapping[str, float] | None = None,
    constants: Mapping[str, int] | None = None,
    *,
    grid: Sequence[int] = (1,),
    threads: Sequence[int] = (32,),
    threadgroup: Mapping[int, int] | None = None,
    **options: Any,
) -> Run:
    """Runs one kernel once; see the module's text for arguments and ``options`` (those of run_many)."""
    call = Call(kernel, arrays, params or {}, constants or {}, grid, threads, True, threadgroup or {})
    return run_many([call], **options)[0]


def run_call(call: Call, **options: Any) -> dict[str, Array]:
    """Runs one call on arrays as they are (``poison`` is off); what its kernel may have written, by name."""
    return run_many([call], poison=None, **options)[0].arrays


def run_many(
    calls: Sequence[Call],
    *,
    order: str = "forward",
    seed: int = 1,
    checked: bool = False,
    act: str = "bf16",
    metal: int = 320,
    workers: int = 1,
    poison: int | None = 0xFF,
    source: str | None = None,
    resolve: Resolver | None = None,
    lax: bool = False,
    raises: bool = True,
) -> list[Run]:
    """Runs the calls in order in one memory.

    With ``raises`` false, reports are returned and raise nothing; ``lax`` allows divergent simdgroup functions;
    ``resolve`` finds what ``source`` includes.
    """
    for call in calls:
        _check(call, act)
    if backend() == "device":
        return _run_on_device(calls, act, metal, poison, own=source is not None or lax or not raises)
    options = {"act": act, "metal": metal, "poison": poison, "source": source}
    memory = _Memory(checked)
    runtime().msl_device_barrier()
    results = []
    try:
        for call in calls:
            # A source of the test's own may have constants that the kernel table does not name.
            own = translation(source, metal, checked, resolve).constants if source else {}
            constants = {k if k in own else constant_name(k): v for k, v in call.constants.items()}
            library = kernel_library(
                call.kernel, constants, act=act, metal=metal, checked=checked, source=source, resolve=resolve
            )
            launch = _launch(call, library, memory, poison)
            launch.order, launch.seed, launch.workers = _ORDERS[order], seed, workers
            launch.flags = CHECK * checked + LAX * lax + RANDOM_LAYOUT * (order == "random")
            results.append(_dispatch(call, launch, library))
        reports = [located(line) for line in runtime().msl_reports().decode().splitlines()] + memory.damage()
        for call, result in zip(calls, results, strict=True):
            result.arrays, result.reports = memory.written(call), reports
    finally:
        memory.free()
        runtime().msl_clear_reports()  # what runs next, be it a whole model, is not to be blamed for them
    if reports and raises:
        raise EmulatorError(", ".join(dict.fromkeys(c.kernel for c in calls)), reports)
    if recorder is not None:
        recorder(calls, results, options)
    return results


def _run_on_device(calls: Sequence[Call], act: str, metal: int, poison: int | None, own: bool) -> list[Run]:
    from msl_device import run_on_device  # which imports what builds the shim

    if own:
        pytest.skip("sources of the tests' own are run by the emulator only")
    return [Run(arrays) for arrays in run_on_device(calls, act, metal, poison)]


def matrix_operands(metal: int = 320) -> str:
    """bf16 or f32: what the matrix units that the shaders run on multiply."""
    from msl_device import matrix_operands

    return matrix_operands(metal) if backend() == "device" else "bf16"


def _dispatch(call: Call, launch: Launch, library: Library) -> Run:
    limit = library.max_threads or (KERNELS[call.kernel].max_threads if call.kernel in KERNELS else 1024)
    count = int(np.prod(launch.group_size[:]))
    if count > limit:
        raise EmulatorError(call.kernel, [f"threads: {count} in a group, the kernel allows {limit}"])
    if call.barrier:
        runtime().msl_device_barrier()
    runtime().msl_dispatch(library.entry, ctypes.byref(launch))
    counts = (ctypes.c_uint64 * 4)()
    runtime().msl_counts(counts)
    return Run({}, [], tuple(counts))


def _check(call: Call, act: str) -> None:
    """Raises unless a call of the table's kernel has what its row says."""
    table = KERNELS.get(call.kernel)
    if table:
        check_names(call)
        for argument in table.args:
            _check_dtype(call.kernel, argument, call.arrays[argument.name], act)


def _launch(call: Call, library: Library, memory: _Memory, poison: int | None) -> Launch:
    launch = Launch()
    launch.name = call.kernel.encode()
    table = KERNELS.get(call.kernel)
    names = [a.name for a in table.args] if table else list(call.arrays)
    readonly = {index: constant for kind, index, constant, _ in library.arguments if kind == BUFFER}
    arrays: list[tuple[str, Array, bool, int | None]] = []
    for i, name in enumerate(names):
        array = call.arrays[name]
        writes, fill = not readonly.get(i, True), None
        if table:
            argument = table.args[i]
            writes, fill = argument.writes, poison if argument.access == "w" else None
        arrays.append((name, array, writes, fill))
    if table and table.params:
        packed = pack_params(table, [_number(call.params[n], t) for n, t in table.params])
        arrays.append(("params", np.frombuffer(packed, np.uint8), False, None))
    for i, (name, array, writes, fill) in enumerate(arrays):
        launch.buffers[i], launch.bytes[i] = memory.place(i, name, array, writes, fill)
    groups, threads = ((*v, 1, 1)[:3] for v in (call.grid, call.threads))
    for d in range(3):
        launch.groups[d], launch.group_size[d], launch.grid[d] = groups[d], threads[d], groups[d] * threads[d]
    for index, size in call.threadgroup.items():
        launch.threadgroup_bytes[index] = size
    return launch


def _number(value: float, kind: str) -> int | float:
    return float(value) if kind == "f32" else int(value)


_DTYPES = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bf16": ml_dtypes.bfloat16}


def _check_dtype(kernel: str, argument: Any, array: Array, act: str) -> None:
    wanted = _DTYPES.get(act if argument.dtype == "act" else argument.dtype)
    if wanted is not None and array.dtype != np.dtype(wanted):
        raise TypeError(f"{kernel}: argument {argument.name} is {np.dtype(wanted).name}, got {array.dtype.name}")


class _Memory:
    """Copies of the caller's arrays in the emulator's memory, each once, with guard zones around."""

    def __init__(self, checked: bool) -> None:
        self.checked = checked
        self.regions: dict[int, int] = {}
        self.bytes: dict[int, Array] = {}  # guard zones included
        self.given: dict[int, Array] = {}
        self.writable: set[int] = set()

    def place(self, number: int, name: str, array: Array, writable: bool, poison: int | None) -> tuple[int, int]:
        """Address and bytes of ``array``, which becomes view ``number`` of the next launch."""
        key = id(array)
        if key not in self.regions:
            # In a checked run the region is the array; else it has guard zones.  A device promises an argument no
            # more than 16 bytes of alignment.
            guard = 0 if self.checked else GUARD
            size = array.nbytes + 2 * guard
            base = runtime().msl_region_new(size, 16)
            raw = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8)
            raw[:] = _GUARD_BYTE
            self.regions[key], self.given[key] = base, array
            self.bytes[key] = raw
            self.contents(key)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if poison is not None:
                self.contents(key)[:] = poison
        if writable:
            self.writable.add(key)
        address = self.contents(key).ctypes.data
        assert runtime().msl_view(number, address, array.nbytes, writable, name.encode()) == 0
        return address, array.nbytes

    def contents(self, key: int) -> Array:
        guard = 0 if self.checked else GUARD
        return self.bytes[key][guard : len(self.bytes[key]) - guard]

    def written(self, call: Call) -> dict[str, Array]:
        out = {}
        for name, array in call.arrays.items():
            if id(array) in self.writable:
                out[name] = self.contents(id(array)).copy().view(array.dtype).reshape(array.shape)
        return out

    def damage(self) -> list[str]:
        """Writes that must not have happened, as reports."""
        found = []
        for key, raw in self.bytes.items():
            array, contents = self.given[key], self.contents(key)
            guard = (len(raw) - len(contents)) // 2
            if (raw[:guard] != _GUARD_BYTE).any() or (raw[guard + len(contents) :] != _GUARD_BYTE).any():
                found.append(f"bounds: something was written outside of the array of shape {array.shape}")
            before = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if key not in self.writable and not np.array_equal(contents, before):
                found.append(f"access: a read-only array of shape {array.shape} was changed")
        return found

    def free(self) -> None:
        for base in self.regions.values():
            runtime().msl_region_free(base)
        self.regions.clear()
