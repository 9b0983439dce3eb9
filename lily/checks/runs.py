# SPDX-License-Identifier: Apache-2.0
"""Single dispatches on a device: buffers for their arguments, one list, wait, results.

A device on which a submission failed is opened anew; one that never answers is given up.
Not handled: several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from lily.checks.values import Array, Value, decode, encoded
from lily.device.device import Buffer, CommandList, Device
from lily.device.host_memory import available_bytes
from lily.errors import DeviceError
from lily.plan.views import Dispatch, Plan, View
from lily.plan.weights_map import align
from lily.policy import Policy
from lily.units import gb

TIMEOUT = 30.0  # seconds: far beyond any list of the doctor, even on a busy machine


class DeviceHangs(DeviceError):
    """A submission did not finish; the device, and its memory, cannot be used or given back."""


class Rig:
    """A device and the policy of its kernels, with what is needed to run single dispatches on it."""

    def __init__(self, open_device: Callable[[], Device], policy: Policy) -> None:
        self._open, self.policy = open_device, policy
        self.device = open_device()
        self.hangs = self.failed = False  # after a failed submission the device may not be what it was

    def close(self) -> None:
        if not self.hangs:  # closing waits for what runs, here without end
            self.device.close()

    def why_not_recovered(self) -> str | None:
        """Puts a fresh device in place of one whose submission failed; None, or why that is not possible."""
        if self.hangs:
            return "an earlier kernel did not finish"
        if self.failed:
            self.device.close()
            try:
                self.device = self._open()
            except DeviceError as problem:
                return f"the device could not be opened again: {problem}"
            self.failed = False
        return None

    def run(self, dispatch: Dispatch, inputs: dict[str, Value]) -> dict[str, Array]:
        """The written arguments of ``dispatch``."""
        with self.recorded([dispatch], [encoded(dispatch, inputs, self.policy)]) as (item, buffers):
            self.seconds(item)
            return {
                a.name: decode(buffers[a.name].bytes[: v.nbytes].copy(), a, self.policy)
                for a, v in zip(dispatch.kernel.args, dispatch.views, strict=True)
                if a.writes
            }

    @contextmanager
    def recorded(
        self, dispatches: Sequence[Dispatch], contents: Sequence[dict[str, Array]], barriers: bool = True
    ) -> Iterator[tuple[CommandList, dict[str, Buffer]]]:
        """A list of dispatches of one kernel.

        Entry i of ``contents`` has the bytes of dispatch i's arguments. What is one array object has one place in the
        device's memory; another view of it has another.
        """
        places = {name: _places([c[name] for c in contents]) for name in contents[0]}
        buffers: dict[str, Buffer] = {}
        item = None
        try:
            for name, (offsets, size) in places.items():
                buffers[name] = self.device.buffer(size)
                for at, c in dict(zip(offsets, contents, strict=True)).items():
                    buffers[name].bytes[at : at + c[name].nbytes] = c[name]
            ready = []
            for i, d in enumerate(dispatches):
                names = [a.name for a in d.kernel.args]
                views = tuple(View(n, places[n][0][i], contents[i][n].nbytes) for n in names)
                ready.append(replace(d, views=views, barrier=barriers and i > 0))
            item = self.device.record(Plan(dispatches[0].kernel.name, tuple(ready), 0), buffers)
            yield item, buffers
        finally:
            if not self.hangs:
                if item is not None:
                    item.free()
                for buffer in buffers.values():
                    buffer.free()

    def seconds(self, item: CommandList) -> float:
        """Runs the list once; what the device needed for it."""
        self.failed = True
        ticket = self.device.submit([item])
        if not self.device.wait(ticket, TIMEOUT):
            self.hangs = True
            raise DeviceHangs(f"{item.name} did not finish within {TIMEOUT:.0f} s")
        self.failed = False
        return self.device.seconds(ticket)


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """(offset of each array in one buffer, its size); one object has one place."""
    offsets: dict[int, int] = {}
    at = 0
    for array in arrays:
        if id(array) not in offsets:
            offsets[id(array)] = at
            at = align(at + array.nbytes)
    return [offsets[id(array)] for array in arrays], at


def why_no_memory(need: int) -> str | None:
    """Why ``need`` bytes are not taken here; None if they are."""
    free = available_bytes()
    return None if need <= 0.8 * free else f"needs {gb(need)}, {gb(free)} are available"


def nbytes(dispatch: Dispatch) -> int:
    """Memory of all arguments."""
    return int(np.sum([align(v.nbytes) for v in dispatch.views]))
