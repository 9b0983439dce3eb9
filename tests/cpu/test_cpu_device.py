# SPDX-License-Identifier: Apache-2.0
"""The CPU device's runtime: options, buffers, recording, tickets, waiting, threads, forks, errors.

Not handled: what kernels compute (test_cpu_matmul.py and its siblings).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from waiting import PATIENCE, until

from lily.device.device import Buffer, CommandList, Device
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

COPY_BLOCK = 65536


def dispatch(kernel: str, views: tuple[View, ...], params: tuple[float, ...], grid: int, **more: Any) -> Dispatch:
    return Dispatch(KERNELS[kernel], kernel, more.pop("constants", ()), views, params, (grid, 1, 1), (1, 1, 1), **more)


def copy(source: View, target: View, barrier: bool = True) -> Dispatch:
    return dispatch("copy", (source, target), (source.nbytes,), -(-source.nbytes // COPY_BLOCK), barrier=barrier)


class Work:
    """A list that carries a buffer's contents through ``steps`` regions, one barrier each."""

    def __init__(self, device: Device, nbytes: int = 1 << 20, steps: int = 3) -> None:
        self.buffer: Buffer = device.buffer(nbytes * (steps + 1))
        self.nbytes, self.steps = nbytes, steps
        parts = [View("b", i * nbytes, nbytes) for i in range(steps + 1)]
        plan = Plan("work", tuple(copy(a, b) for a, b in pairwise(parts)), 0)
        self.list: CommandList = device.record(plan, {"b": self.buffer})

    def fill(self, value: int) -> None:
        self.buffer.bytes[: self.nbytes] = value

    @property
    def result(self) -> int:
        last = self.buffer.bytes[-self.nbytes :]
        assert np.all(last == last[0])
        return int(last[0])


# ---- options --------------------------------------------------------------------------------------------------------


def test_info_names_what_runs() -> None:
    with Device("cpu", threads=3, isa="portable") as device:
        info = device.info
        assert (info["name"], info["isa"], info["threads"]) == ("cpu", "portable", 3)
        assert info["isas"].split(",")[-1] == "portable"
        assert int(info["memory"]) > 1 << 28


def test_threads_default_to_the_usable_processors() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system cannot say which processors a process may use")
    with Device("cpu") as device:
        assert 1 <= int(device.info["threads"]) <= len(os.sched_getaffinity(0))
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from lily.device import device; "
    code += "print(device.Device('cpu').info)"
    assert "'threads': 1" in subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": 0}, r"threads is \"0\"; allowed: 1 to 256"),
        ({"threads": "many"}, r"threads is \"many\"; allowed: 1 to 256"),
        ({"speed": 11}, r"no option \"speed\"; it has: threads, isa, null, discrete"),
        ({"null": 2}, r"null is \"2\"; allowed: 0, 1"),
        ({"isa": "sse9"}, r"no instruction-set path \"sse9\".*it has: .*portable"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(options: dict[str, object], says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        Device("cpu", **options)  # type: ignore[arg-type]


def test_the_environment_forces_a_path_unless_an_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_CPU", "portable")
    with Device("cpu") as device:
        assert device.info["isa"] == "portable"
        best = device.info["isas"].split(",")[0]
    with Device("cpu", isa=best) as device:
        assert device.info["isa"] == best


def test_a_forced_path_that_is_missing_is_an_error_that_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with Device("cpu") as device:
        missing = "avx512" if "neon" in device.info["isas"] else "neon"
    monkeypatch.setenv("LILY_CPU", missing)
    with pytest.raises(DeviceError, match=rf"{missing}.*LILY_CPU.*it has: .*portable"):
        Device("cpu")


# ---- buffers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [16, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_buffers_are_aligned_zero_and_writable_to_their_end(nbytes: int) -> None:
    with Device("cpu", threads=1) as device:
        buffer = device.buffer(nbytes)
        assert buffer.address % 256 == 0
        assert not buffer.bytes.any()
        buffer.bytes[:] = 255
        assert int(buffer.bytes.sum(dtype=np.int64)) == 255 * nbytes
        buffer.free()


def test_a_buffer_beyond_the_address_space_is_refused() -> None:
    with Device("cpu", threads=1) as device, pytest.raises(DeviceError, match=r"buffer of 1125899906842624 bytes"):
        device.buffer(1 << 50)


def test_buffers_may_outlive_their_device() -> None:
    device = Device("cpu", threads=2)
    buffer = device.buffer(1 << 20)
    device.close()
    buffer.bytes[:] = 1
    buffer.free()


# ---- recording ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constants", "says"),
    [
        ((3, 64), r"kernel gemv: constant bits is 3; allowed: 4, 8"),
        ((4, 48), r"kernel gemv: constant group is 48; allowed: 32, 64, 128"),
        ((4,), r"kernel gemv takes 2 constants \(bits group\), 1 were given"),
        ((4, 64, 1), r"kernel gemv takes 2 constants \(bits group\), 3 were given"),
    ],
)
def test_constants_are_checked(constants: tuple[int, ...], says: str) -> None:
    with Device("cpu", threads=1) as device, pytest.raises(DeviceError, match=says):
        device.kernel(KERNELS["gemv"], constants)


def test_a_kernel_is_made_once_per_constants() -> None:
    with Device("cpu", threads=1) as device:
        handles = [device.kernel(KERNELS["gemv"], c) for c in ((4, 64), (4, 64), (4, 32), (8, 64), (4, 64))]
        assert len(set(handles)) == 3
        assert handles[0] == handles[1] == handles[4]


def test_dimensions_must_be_positive_and_flags_may_be_zero() -> None:
    with Device("cpu", threads=1) as device:
        assert device.kernel(KERNELS["attn_decode"], (16, 2, 256, 64, 8, 0))
        with pytest.raises(DeviceError, match=r"constant dim is 0; allowed: 1 or more"):
            device.kernel(KERNELS["attn_decode"], (16, 2, 0, 64, 8, 0))


def test_every_kernel_of_the_table_exists_except_those_of_ablations() -> None:
    with Device("cpu", threads=1) as device:
        for kernel in KERNELS.values():
            special = {"bits": 4, "shared_bits": 4, "group": 64, "shared_group": 64}
            constants = [special.get(c, 1) for c in kernel.constants]
            if kernel.ablation is None:
                assert device.kernel(kernel, constants)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"views": (View("a", 0, 64),)}, r"copy takes 2 buffers, 1 were given"),
        ({"views": (View("a", 8, 64), View("a", 128, 64))}, r"offset 8 of buffer 0 is no multiple of 16"),
        ({"views": (View("a", 0, 64), View("a", 8192, 64))}, r"offset 8192 lies beyond the 4096 bytes of buffer 1"),
        ({"grid": (0, 1, 1)}, r"a grid of 0 x 1 x 1 groups"),
        ({"grid": (65536, 65536, 1)}, r"a grid of 65536 x 65536 x 1 groups"),
    ],
)
def test_recording_refuses_what_cannot_run(change: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "kernel": KERNELS["copy"], "label": "", "constants": (), "views": (View("a", 0, 64), View("a", 64, 64)),
        "params": (64,), "grid": (1, 1, 1), "threads": (1, 1, 1),
    }  # fmt: skip
    with Device("cpu", threads=1) as device:
        buffers = {"a": device.buffer(4096)}
        device.record(Plan("good", (Dispatch(**good),), 0), buffers)
        with pytest.raises(DeviceError, match=says):
            device.record(Plan("bad", (Dispatch(**{**good, **change}),), 0), buffers)


# ---- running --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_barriers_order_dispatches(threads: int) -> None:
    with Device("cpu", threads=threads) as device:
        work = Work(device, nbytes=3 * COPY_BLOCK + 16, steps=20)
        for value in (7, 200, 1):
            work.fill(value)
            assert device.wait(device.submit([work.list]), timeout=PATIENCE)
            assert work.result == value


def test_dispatches_without_a_barrier_all_run() -> None:
    with Device("cpu", threads=4) as device:
        count, nbytes = 40, COPY_BLOCK + 16
        source, target = device.buffer(count * nbytes), device.buffer(count * nbytes)
        source.bytes[:] = np.arange(count * nbytes) % 251
        copies = tuple(
            copy(View("s", i * nbytes, nbytes), View("t", i * nbytes, nbytes), barrier=i % 7 == 0) for i in range(count)
        )
        recorded = device.record(Plan("copies", copies, 0), {"s": source, "t": target})
        assert device.wait(device.submit([recorded]), timeout=PATIENCE)
        assert np.array_equal(source.bytes, target.bytes)


def test_tickets_count_up_and_complete_in_order() -> None:
    with Device("cpu", threads=2) as device:
        work = Work(device)
        tickets = [device.submit([work.list] * (i % 3)) for i in range(10)]
        assert tickets == list(range(1, 11))
        assert device.wait(tickets[4], timeout=PATIENCE)
        assert device.lib.lily_completed(device.handle) >= 5
        assert device.wait(10, timeout=PATIENCE)
        assert device.lib.lily_completed(device.handle) == 10
        assert device.wait(3, timeout=0)


def test_lists_of_one_submission_run_in_order() -> None:
    with Device("cpu", threads=2) as device:
        buffer = device.buffer(3 << 20)
        a, b, c = (View("b", i << 20, 1 << 20) for i in range(3))
        first, second = (device.record(Plan("x", (copy(s, t),), 0), {"b": buffer}) for s, t in ((a, b), (b, c)))
        buffer.bytes[: 1 << 20] = 9
        assert device.wait(device.submit([first, second]), timeout=PATIENCE)
        assert np.all(buffer.bytes == 9)


def test_waiting_gives_up_after_the_timeout_and_says_so() -> None:
    with Device("cpu", threads=1) as device:
        work = Work(device, nbytes=32 << 20, steps=4)
        # A machine that holds this thread back may be through with a batch before it is waited for, but not each time.
        for _ in range(100):
            last = [device.submit([work.list]) for _ in range(8)][-1]
            if not device.wait(last, timeout=0.01):
                break
        assert f"ticket {last} did not finish within 0.010 s".encode() in device.lib.lily_error(device.handle)
        assert device.wait(last)


def test_a_ticket_that_was_never_given_is_an_error() -> None:
    says = r"ticket 5 was never given; the last one is 0"
    with Device("cpu", threads=1) as device, pytest.raises(DeviceError, match=says):
        device.wait(5, timeout=1)


def test_seconds_are_known_for_recent_tickets_only() -> None:
    with Device("cpu", threads=1) as device:
        work = Work(device)
        for _ in range(70):
            last = device.submit([work.list])
        device.wait(last)
        assert device.seconds(last) > 0
        assert device.seconds(last - 63) > 0
        assert device.seconds(last - 64) < 0
        assert device.seconds(last + 1) < 0
        assert device.seconds(0) < 0


def test_many_threads_may_wait_at_once() -> None:
    with Device("cpu", threads=2) as device:
        work = Work(device, nbytes=4 << 20)
        tickets = [device.submit([work.list]) for _ in range(12)]
        seen = []

        def waiter(ticket: int) -> None:
            assert device.wait(ticket, timeout=PATIENCE)
            seen.append(ticket)

        threads = [threading.Thread(target=waiter, args=(t,)) for t in tickets * 2]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(seen) == sorted(tickets * 2)


def test_a_full_queue_is_an_error_and_what_was_queued_still_runs() -> None:
    with Device("cpu", threads=1) as device:
        work = Work(device, nbytes=16 << 20)
        first = device.submit([work.list] * 4)
        with pytest.raises(DeviceError, match=r"wait for a ticket"):
            device.submit([work.list] * 4093)
        assert device.wait(first, timeout=PATIENCE)
        assert device.submit([work.list]) == first + 1  # what was refused has no ticket


def test_the_null_device_completes_without_running() -> None:
    with Device("cpu", threads=1, null=1) as device:
        work = Work(device)
        work.fill(3)
        ticket = device.submit([work.list])
        assert device.wait(ticket, timeout=PATIENCE)
        assert work.result == 0
        assert device.info["null"] == 1


def test_closing_waits_for_what_was_submitted() -> None:
    device = Device("cpu", threads=2)
    work = Work(device, nbytes=16 << 20)
    work.fill(5)
    for _ in range(5):
        device.submit([work.list])
    device.close()
    assert work.result == 5


def test_devices_of_one_process_do_not_disturb_each_other() -> None:
    devices = [Device("cpu", threads=2) for _ in range(4)]
    works = [Work(d, nbytes=1 << 18) for d in devices]
    for i, work in enumerate(works):
        work.fill(i + 1)
    tickets = [d.submit([w.list] * 20) for d, w in zip(devices, works, strict=True)]
    for i, (device, ticket, work) in enumerate(zip(devices, tickets, works, strict=True)):
        assert device.wait(ticket, timeout=PATIENCE)
        assert work.result == i + 1
    with pytest.raises(DeviceError, match=r"list 0 .* belongs to another device"):
        devices[0].submit([works[1].list])
    for device in devices:
        device.close()


threads_are_listed = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a thread does")


def sleeps(thread: int) -> bool:
    """Whether a thread of this process waits for something; one that spins, or would run, does not."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except FileNotFoundError:  # it has ended
        return False


@threads_are_listed
def test_workers_sleep_when_there_is_nothing_to_do() -> None:
    def threads() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    before = threads()
    with Device("cpu", threads=4) as device:
        work = Work(device)
        device.wait(device.submit([work.list]))
        workers = threads() - before
        assert len(workers) >= 3
        until(lambda: all(map(sleeps, workers)), "workers do not use the processor")


@threads_are_listed
def test_waiting_uses_no_processor_time() -> None:
    """A thread that waits is seen to sleep again and again before what it waits for has come."""
    with Device("cpu", threads=1) as device:
        work = Work(device, nbytes=64 << 20)
        lists, seen = 10, False
        while not seen:
            ticket = device.submit([work.list] * lists)
            waiter = threading.Thread(target=device.wait, args=[ticket])
            waiter.start()
            seen = all(_look_again(waiter) for _ in range(5)) and not device.wait(ticket, timeout=0)
            waiter.join()
            lists *= 2
            assert lists < 1000, "who waits spins"


def _look_again(thread: threading.Thread) -> bool:
    time.sleep(0.001)  # not to wait for anything: who holds the interpreter would see the other one wait for that
    return sleeps(thread.native_id or 0)


def test_subnormal_results_count_as_zero() -> None:
    """Without flush-to-zero on the workers, products of tiny numbers would be hundreds of times slower."""
    with Device("cpu", threads=1) as device:
        buffer = device.buffer(4096)
        x = buffer.array(np.float32)
        x[:16], x[16:32] = 1e-30, 1e-10
        # y = silu(gate)·up with gate = 1e-30: 0.5e-40 is subnormal
        views = (View("b", 0, 64), View("b", 64, 64), View("b", 128, 64))
        recorded = device.record(Plan("p", (dispatch("swiglu", views, (16, 1), 1),), 0), {"b": buffer})
        x[32:48] = 1
        device.wait(device.submit([recorded]))
        assert np.all(x[32:48] == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_an_error_and_can_open_its_own_device() -> None:
    device = Device("cpu", threads=2)
    work = Work(device)
    device.wait(device.submit([work.list]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lost = 0
            for call in (lambda: device.submit([work.list]), lambda: device.kernel(KERNELS["swiglu"])):
                try:
                    call()
                except DeviceError as error:
                    lost += bool(re.search(r"belongs to process \d+, which forked", str(error)))
            code = 0 if lost == 2 else 2
            device.close()
            with Device("cpu", threads=2) as own:
                mine = Work(own)
                mine.fill(4)
                own.wait(own.submit([mine.list]))
                code = code or (0 if mine.result == 4 else 3)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    work.fill(6)
    assert device.wait(device.submit([work.list]), timeout=PATIENCE)
    assert work.result == 6
    device.close()


# ---- memory ---------------------------------------------------------------------------------------------------------

# A product whose packed rows take 16 MB or more on every instruction set, under a limit of 8 MB on what may be added.
STARVED = """
import resource, numpy as np
from lily.device.device import Device
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

rows, k = 512, 1 << 15
device = Device("cpu", threads=2)
sizes = {"step": 16, "x": 4 * rows * k, "w": 16 * (k + k // 128 * 4), "y": 4 * rows * 16}
buffers = {name: device.buffer(size) for name, size in sizes.items()}
buffers["step"].array(np.int32)[1] = rows
buffers["x"].array(np.float32)[:] = 1
buffers["w"].bytes[:] = 0
row = KERNELS["gemm"]
params = {"n": 16, "k": k, "pitch": 16, "column": 0, "tile_n": 16}
views = tuple(View(name, 0, size) for name, size in sizes.items())
values = tuple(params[name] for name, _ in row.params)
plan = Plan("gemm", (Dispatch(row, "", (8, 128, 512), views, values, (1, 1, 1), (1, 1, 1)),), 0)
product, nothing = device.record(plan, buffers), device.record(Plan("nothing", (), 0), buffers)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), limits[1]))
failed, second = device.submit([nothing, product, product]), device.submit([product])
device.wait(device.submit([nothing]))
for ticket in (failed, second):
    try:
        device.wait(ticket)
    except DeviceError as error:
        print(error, error.again)
    device.wait(failed)  # told once, also while another is to be told
device.wait(second)
resource.setrlimit(resource.RLIMIT_AS, limits)
buffers["y"].array(np.float32)[:] = 7
device.wait(device.submit([product]))
print(buffers["y"].array(np.float32).any())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's address space")
def test_a_kernel_without_memory_fails_its_submission_and_no_other() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    *errors, zero = done.stdout.splitlines()
    assert len(errors) == 2
    for error in errors:
        assert re.fullmatch(r"cpu device: no memory left for \d+ bytes of a kernel's scratch; .* False", error)
    assert zero == "False"  # once there is memory the same list runs
