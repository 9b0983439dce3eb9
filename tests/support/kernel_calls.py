# SPDX-License-Identifier: Apache-2.0
"""Runs dispatches on an open device, on numpy arrays: what the harnesses of CPU kernels and of shaders share.

Every argument lies between guard zones, and what no kernel may write must come back unchanged, so that a kernel that
writes outside of its outputs fails whatever the test looks at.  Not handled: whole plans (tests of the engine), time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lily.device.device import Buffer, Device
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

Array = np.ndarray[Any, np.dtype[Any]]

GUARD = 512  # bytes before and behind every array
_GUARD_BYTE = 0xA5


@dataclass
class Call:
    """One dispatch: arrays by argument name; arguments that the kernel writes are given with their shape's contents."""

    kernel: str
    arrays: Mapping[str, Array]
    params: Mapping[str, float] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    grid: Sequence[int] = (1,)
    threads: Sequence[int] = (32,)
    barrier: bool = True
    threadgroup: Mapping[int, int] = field(default_factory=dict)  # bytes of threadgroup arguments, by index


RunCall = Callable[[Call], dict[str, Array]]  # runs a call; what its kernel may have written, by name


def check_names(call: Call) -> None:
    """ValueError unless the call names exactly what its row of the kernel table has."""
    table = KERNELS[call.kernel]
    for kind, wanted, given in (
        ("arrays", [a.name for a in table.args], call.arrays),
        ("parameters", [name for name, _ in table.params], call.params),
        ("constants", list(table.constants), call.constants),
    ):
        if set(given) != set(wanted):
            raise ValueError(f"{call.kernel} takes the {kind} {wanted}, got {sorted(given)}")


def run_calls(
    device: Device, calls: Sequence[Call], *, poison: int | None = None, skew: int = 0, timeout: float = 120
) -> list[dict[str, Array]]:
    """Runs the calls as one list; returns for each what its kernel may have written, by name.

    Equal array objects are one buffer.  With ``poison``, arguments that are only written are filled with it first.
    ``skew``: bytes by which arguments lie off a coarser alignment than the 16 bytes that a device is promised.
    """
    memory = _Memory(device, poison, GUARD + skew)
    try:
        recorded = device.record(Plan("test", tuple(map(memory.dispatch, calls)), 0), memory.buffers)
        try:
            assert device.wait(device.submit([recorded]), timeout), "the kernels did not finish"
        finally:
            recorded.free()
        memory.check(", ".join(dict.fromkeys(c.kernel for c in calls)))
        return [memory.written(c) for c in calls]
    finally:
        memory.free()


class _Memory:
    """The caller's arrays in the device's memory, each once, with guard zones around."""

    def __init__(self, device: Device, poison: int | None, offset: int) -> None:
        self.device, self.poison, self.offset = device, poison, offset
        self.buffers: dict[str, Buffer] = {}
        self.given: dict[str, tuple[str, Array]] = {}  # by buffer: argument's name, array
        self.writable: set[str] = set()

    def dispatch(self, call: Call) -> Dispatch:
        check_names(call)
        table = KERNELS[call.kernel]
        x, y, z = (*call.grid, 1, 1)[:3]
        threads = (*call.threads, 1, 1)[:3]
        return Dispatch(
            kernel=table,
            label=call.kernel,
            constants=tuple(int(call.constants[c]) for c in table.constants),
            views=tuple(self._place(a, call.arrays[a.name]) for a in table.args),
            params=tuple(float(call.params[p]) if t == "f32" else int(call.params[p]) for p, t in table.params),
            grid=(x, y, z),
            threads=(threads[0], threads[1], threads[2]),
            barrier=call.barrier,
        )

    def _place(self, argument: Any, array: Array) -> View:
        key = str(id(array))
        if key not in self.buffers:
            self.buffers[key] = buffer = self.device.buffer(self.offset + array.nbytes + GUARD)
            self.given[key] = argument.name, array
            buffer.bytes[:] = _GUARD_BYTE
            only_written = argument.access == "w" and self.poison is not None
            self._contents(key)[:] = self.poison if only_written else _bytes(array)
        if argument.writes:
            self.writable.add(key)
        return View(key, self.offset, array.nbytes)

    def _contents(self, key: str) -> Array:
        return self.buffers[key].bytes[self.offset : self.offset + self.given[key][1].nbytes]

    def check(self, kernels: str) -> None:
        """AssertionError if something was written that must not be."""
        for key, (name, array) in self.given.items():
            raw, end = self.buffers[key].bytes, self.offset + array.nbytes
            assert (raw[: self.offset] == _GUARD_BYTE).all(), f"{kernels} wrote before the start of {name}"
            assert (raw[end:] == _GUARD_BYTE).all(), f"{kernels} wrote beyond the end of {name}"
            changed = key not in self.writable and not np.array_equal(self._contents(key), _bytes(array))
            assert not changed, f"{kernels} changed {name}, which may only be read"

    def written(self, call: Call) -> dict[str, Array]:
        """Copies of the call's arguments that its or another call's kernel may write."""
        pairs = [(name, array, str(id(array))) for name, array in call.arrays.items()]
        return {
            name: self._contents(key).copy().view(array.dtype).reshape(array.shape)
            for name, array, key in pairs
            if key in self.writable
        }

    def free(self) -> None:
        for buffer in self.buffers.values():
            buffer.free()


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
