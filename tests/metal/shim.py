# SPDX-License-Identifier: Apache-2.0
"""Fixtures and small plans for the tests of the Metal shim on the stand-in: a pytest plugin (conftest.py).

The stand-in complains about every use that Metal does not allow and counts the objects that exist; both are checked
after every test that uses ``metal`` or ``emulated``.  Not handled: engines with other settings (metal/engine.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from metal.coverage import summary
from metal.engine import emulated_metal
from metal.standin import Standin, require_standin
from waiting import until

from lily.device.device import Buffer, CommandList, Device, _Arg, _U32x3, pack_params
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

Open = Callable[..., Device]
COPY = KERNELS["copy"]
BYTES = 1024


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the coverage of the shim if it was measured."""
    lines = summary()
    if lines:
        terminalreporter.section("objc_shim")
    for line in lines:
        terminalreporter.line(line)


@pytest.fixture
def metal() -> Iterator[Standin]:
    """The stand-in, which runs no kernel; the test must leave no broken rule and no object."""
    s = require_standin()
    s.reset()
    s.set(journal=1)
    before = s.live
    yield s
    found, left = s.complaints, s.live
    s.reset()
    assert found == []
    assert left == before


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Standin]:
    """The stand-in as the metal device of engines, with kernels run by the emulator."""
    with emulated_metal(tmp_path) as s:
        yield s


@pytest.fixture
def shader_file(tmp_path: Path) -> Path:
    path = tmp_path / "shaders.metal"
    path.write_text("kernel void copy() {}\n")
    return path


@pytest.fixture
def opened(metal: Standin, shader_file: Path) -> Iterator[Open]:
    """Opens devices on the stand-in and closes them."""
    devices = []

    def open_device(**options: object) -> Device:
        device = Device("metal", library=metal.path, **{"source": shader_file, "cache": "off", "keep_s": 0, **options})
        devices.append(device)
        return device

    yield open_device
    for device in devices:
        device.close()


def dispatch(barrier: bool = False, threads: int = 32, src: str = "a", dst: str = "b", grid: int = 1) -> Dispatch:
    """The kernel ``copy``, of which the stand-in only looks at what it is given."""
    views = (View(src, 0, BYTES), View(dst, 0, BYTES))
    return Dispatch(COPY, "copy", (), views, (BYTES,), (grid, 1, 1), (threads, 1, 1), barrier=barrier)


def plan(*dispatches: Dispatch) -> Plan:
    return Plan("test", dispatches, 0, {v.buffer: BYTES for d in dispatches for v in d.views})


class Work:
    """A device with buffers a … d and recorded lists; gives everything back."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.buffers: dict[str, Buffer] = {name: device.buffer(BYTES) for name in "abcd"}
        self.lists: list[CommandList] = []

    def record(self, *dispatches: Dispatch) -> CommandList:
        self.lists.append(self.device.record(plan(*dispatches), self.buffers))
        return self.lists[-1]

    def close(self) -> None:
        for item in [*self.lists, *self.buffers.values()]:
            item.free()
        self.device.close()


@pytest.fixture
def work(opened: Open) -> Iterator[Work]:
    w = Work(opened())
    yield w
    w.close()


def sent(metal: Standin, since: int = 0) -> list[str]:
    """The journal without numbers of encoders and commits."""
    return [
        line.split(" ")[0] for line in metal.journal[since:] if not line.startswith(("device", "compile", "residency"))
    ]


def record_into(work: Work, out: CommandList, d: Dispatch) -> None:
    args = (_Arg * len(d.views))(*(_Arg(work.buffers[v.buffer].handle, v.offset) for v in d.views))
    params = pack_params(d.kernel, d.params)
    work.device._check(
        work.device.lib.lily_list_dispatch(
            out.handle, work.device.kernel(d.kernel), args, len(args), params, len(params), _U32x3(*d.grid),
            _U32x3(*d.threads), d.barrier,
        )
    )  # fmt: skip


def long_list(work: Work, levels: int = 8) -> CommandList:
    return work.record(*(dispatch(barrier=i > 0, grid=100_000) for i in range(levels)))


def commits(metal: Standin) -> int:
    return sum(line.startswith("commit") for line in metal.journal)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


def heap_bytes() -> int:
    """What this thread's heap holds; 0 where the C library does not tell."""
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    tell.restype = _Mallinfo
    return int(tell().uordblks)


def check_steps_leave_nothing(metal: Standin, work: Work, lists: Sequence[CommandList], steps: int = 400) -> None:
    """Submits ``lists`` 1,000 times and more: neither Metal's objects nor the host's memory may grow."""
    metal.set(journal=0)
    tickets = [work.device.submit(lists)]

    def run() -> int:
        """Runs some steps; by how much the heap grew."""
        heap = heap_bytes()
        for _ in range(steps):
            work.device.wait(tickets.pop())
            tickets.append(work.device.submit(lists))
        work.device.wait(tickets[0])
        # The stand-in lets go of a command buffer after its ticket has finished.
        until(lambda: not metal.live.get("command buffer"), "all command buffers are gone")
        return heap_bytes() - heap

    run()
    before = metal.live
    growth = [run() for _ in range(3)]
    assert metal.live == before
    # Pools of GNUstep grow now and then; what a step leaves behind is seen every time.
    assert min(growth) < 16 * steps, "less than the smallest allocation a step"
