# SPDX-License-Identifier: Apache-2.0
"""The Metal shim under GNUstep against a stand-in for Metal: what it sends, refuses, and says when Metal fails.

The stand-in (tests/metal/) complains about every use that Metal does not allow and counts the objects that exist; both
are checked after every test here.  Not handled: what kernels compute (test_metal_engine.py and the shader tests).
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_harness import environment
from metal.standin import Kernel, Standin, standin
from metal.toolchain import Missing

from lily.device import Buffer, CommandList, Device
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.msl.flatten import constant_index
from lily.plan.views import Dispatch, Plan, View

Open = Callable[..., Device]
COPY = KERNELS["copy"]
BYTES = 1024


@pytest.fixture
def metal() -> Iterator[Standin]:
    """The stand-in; the test must leave no broken rule and no object."""
    try:
        s = standin()
    except Missing as problem:
        pytest.skip(str(problem))
    s.reset()
    s.set(journal=1)
    before = s.live
    yield s
    found, left = s.complaints, s.live
    s.reset()
    assert found == []
    assert left == before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "shaders.metal"
    path.write_text("kernel void copy() {}\n")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def opened(metal: Standin, source: Path) -> Iterator[Open]:
    """Opens devices on the stand-in and closes them."""
    devices = []

    def open_device(**options: object) -> Device:
        device = Device("metal", library=metal.path, **{"source": source, "cache": "off", "keep_s": 0, **options})
        devices.append(device)
        return device

    yield open_device
    for device in devices:
        device.close()


def dispatch(barrier: bool = False, threads: int = 32, src: str = "a", dst: str = "b", grid: int = 1) -> Dispatch:
    """The kernel `copy`, of which the stand-in only looks at what it is given."""
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


# ---- opening ----
def test_shaders_are_compiled_as_msl_3_2_with_relaxed_math_and_precise_functions(metal: Standin, opened: Open) -> None:
    opened()
    (line,) = (x for x in metal.journal if x.startswith("compile"))
    assert line.endswith("version 30002, math mode 1, functions 1")


def test_the_language_version_can_be_chosen(metal: Standin, opened: Open) -> None:
    assert str(opened(msl="4.0").info["msl"]) == "4.0"
    assert any("version 40000" in x for x in metal.journal)


MATRIX = {
    "M1": ({"family": 7}, "3.2", "simdgroup float"),
    "M2": ({"family": 8}, "3.2", "simdgroup float"),
    "M3": ({"family": 9, "macos": 26.4}, "3.2", "simdgroup bfloat"),
    "M5 before macOS 26.1": ({"family": 10, "macos": 26.0}, "3.2", "simdgroup bfloat"),
    "M5": ({"family": 10, "macos": 26.1}, "4.0", "tensor"),
    "M5 whose compiler refuses": (
        {"family": 10, "macos": 26.1, "fail_compile": 4}, "3.2",
        "simdgroup bfloat, no tensor operations: Metal does not compile the shaders (MSL 4.0): program_source:1:1"),
    "M5 whose probe fails": (
        {"family": 10, "macos": 26.1, "fail_pipeline": 1}, "3.2",
        "simdgroup bfloat, no tensor operations: Metal makes no pipeline of kernel gemm: made to fail"),
}  # fmt: skip


@pytest.mark.parametrize("case", MATRIX)
def test_the_matrix_units_are_chosen_by_family_system_and_a_probe(case: str, metal: Standin, opened: Open) -> None:
    settings, language, matrix = MATRIX[case]
    metal.set(**settings)
    sources = []

    def compile(source: str, _: str, __: dict[int, int]) -> Kernel:
        sources.append(source)
        return Kernel()

    metal.run_kernels(compile)
    device = opened()
    info = device.info
    assert str(info["msl"]) == language
    assert str(info["matrix"]).startswith(matrix)
    device.kernel(COPY)
    assert ("LILY_MATRIX_F32" in sources[-1]) == (matrix == "simdgroup float")
    assert device.info["pipelines"] == 1, "the probe's does not count"


def test_info_tells_chip_family_memory_and_choices(metal: Standin, opened: Open) -> None:
    metal.set(family=8, working_set=23e9, max_buffer=9e9)
    info = opened().info
    assert (info["name"], info["chip"], info["family"]) == ("metal", "Stand-in M0", "apple8")
    assert (info["memory"], info["max_buffer"]) == (23000000000, 9000000000)
    assert (info["shaders"], info["residency"], info["cache"]) == ("source", "off", "off")


def test_a_compiled_library_is_preferred_to_the_source(metal: Standin, opened: Open, tmp_path: Path) -> None:
    (tmp_path / "lily.metallib").write_text("MTLB")
    assert opened(metallib=tmp_path / "lily.metallib").info["shaders"] == "metallib"
    assert [x for x in metal.journal if x.startswith(("load", "compile"))] == [f"load {tmp_path / 'lily.metallib'}"]


# What is set, what is then told.
REFUSALS: dict[str, tuple[dict[str, float], str]] = {
    "no GPU": ({"no_default": 1, "no_devices": 1}, "Metal finds no GPU.*--device cpu"),
    "an old macOS": ({"macos": 14.7}, "needs macOS 15 or later, this is 14.7; use --device cpu"),
    "a system without a version": ({"macos": 0}, r"this is 0\.0"),
    "an old family": ({"family": 6}, r"Apple GPU family 6; .* needs 7 \(M1\)"),
    "separate memory": ({"unified": 0}, "unified memory"),
    "no queue": ({"fail_queue": 1}, "gave no command queue"),
    "shaders that do not compile": ({"fail_compile": 1}, r"not compile the shaders \(MSL 3\.2\): program_source:1:1"),
    "no residency set": ({"fail_set": 1}, "no residency set: made to fail"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_opening_fails_with_cause_and_remedy(case: str, metal: Standin, opened: Open) -> None:
    settings, message = REFUSALS[case]
    metal.set(**settings)
    with pytest.raises(DeviceError, match=message):
        opened(keep_s=1)


def test_a_gpu_that_is_only_in_the_list_of_devices_is_found(metal: Standin, opened: Open) -> None:
    metal.set(no_default=1)
    assert opened().info["chip"] == "Stand-in M0"


OPTIONS = {
    "no shaders": ({"source": None}, "option source=FILE"),
    "an unknown key": ({"threads": 3}, r'unknown option "threads"; the metal device knows source, metallib'),
    "a number that is none": ({"slice_ms": "soon"}, r'slice_ms is "soon"; allowed: 0 to 600000'),
    "a number that is too large": ({"slice_ms": 600001}, "allowed: 0 to 600000"),
    "an empty value": ({"msl": ""}, "value of 0 characters"),
    "a language that is none": ({"msl": "three"}, r'msl is "three"; allowed: auto, or 3\.2 and later'),
    "a source that is missing": ({"source": "/nowhere/x.metal"}, "/nowhere/x.metal cannot be read"),
    "a path that is too long": ({"cache": "/" + "x" * 1024}, "value of 1025 characters"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_named(case: str, opened: Open) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(DeviceError, match=message):
        opened(**options)


def test_a_source_that_is_no_text_is_refused(opened: Open, source: Path) -> None:
    source.write_bytes(b"\xff\xfe")
    with pytest.raises(DeviceError, match="no UTF-8 text"):
        opened()


def test_a_metallib_that_does_not_load_says_what_to_do(metal: Standin, opened: Open, tmp_path: Path) -> None:
    metal.set(fail_metallib=1)
    with pytest.raises(DeviceError, match=r"lib cannot be loaded \(made to fail\); delete it"):
        opened(metallib=tmp_path / "lib")


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_the_watchdog_is_relaxed_before_metal_starts_unless_the_user_chose(
    before: str | None, after: str, metal: Standin, opened: Open
) -> None:
    name = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
    with environment(name, before):
        # Metal reads the C library's environment, which Python's view does not follow.
        opened()
        assert metal.journal[0] == f"device {name}={after}"
        os.unsetenv(name)


# ---- buffers ----
def test_buffers_are_shared_zero_filled_pages(opened: Open) -> None:
    device = opened()
    buffers = [device.buffer(n) for n in (1, 5000, 70000)]
    for b in buffers:
        assert b.address % 4096 == 0
        assert not b.bytes.any()
        b.bytes[:] = 1
    assert device.info["allocated"] == sum(max(b.nbytes, 16) for b in buffers)
    for b in buffers:
        b.free()
    assert device.info["allocated"] == 0


def test_more_than_the_working_set_is_refused_with_the_numbers(metal: Standin, opened: Open) -> None:
    metal.set(working_set=1e6)
    device = opened()
    first = device.buffer(600_000)
    with pytest.raises(DeviceError, match=r"0\.00 GB more on top of 0\.00 GB.*iogpu\.wired_limit_mb"):
        device.buffer(500_000)
    first.free()
    device.buffer(500_000).free()


def test_a_buffer_beyond_the_longest_is_refused(metal: Standin, opened: Open) -> None:
    metal.set(max_buffer=1e6)
    with pytest.raises(DeviceError, match="beyond what one buffer of this GPU may have"):
        opened().buffer(2_000_000)


def test_an_allocation_that_metal_refuses_is_an_error(metal: Standin, opened: Open) -> None:
    metal.set(fail_buffer=2)
    device = opened()
    first = device.buffer(100)
    with pytest.raises(DeviceError, match="Metal refused a buffer"):
        device.buffer(100)
    first.free()


def test_buffers_and_lists_may_be_freed_after_the_device_was_closed(work: Work) -> None:
    work.device.wait(work.device.submit([work.record(dispatch())]))
    work.device.close()


# ---- kernels ----
def capture_constants(metal: Standin) -> list[tuple[str, dict[int, int]]]:
    """Every function that is asked for, with its constants by index."""
    asked: list[tuple[str, dict[int, int]]] = []

    def compile(_: str, name: str, constants: dict[int, int]) -> Kernel:
        asked.append((name, constants))
        return Kernel()

    metal.run_kernels(compile)
    return asked


def test_every_constant_has_the_index_that_the_shaders_declare(metal: Standin, opened: Open) -> None:
    asked, index = capture_constants(metal), constant_index()
    device = opened()
    for kernel in KERNELS.values():
        device.kernel(kernel, range(100, 100 + len(kernel.constants)))
    wanted = [(k.name, {index[c]: 100 + i for i, c in enumerate(k.constants)}) for k in KERNELS.values()]
    assert asked == wanted


def test_a_kernel_is_made_once_for_each_set_of_constants(metal: Standin, opened: Open) -> None:
    asked = capture_constants(metal)
    device, gemv = opened(), KERNELS["gemv_norm"]
    a, b, again = (device.kernel(gemv, c) for c in ((4, 64), (8, 64), (4, 64)))
    assert a == again != b
    assert len(asked) == 2
    assert device.info["pipelines"] == 2


def test_an_unknown_kernel_and_wrong_constants_are_named(opened: Open) -> None:
    device = opened()
    with pytest.raises(DeviceError, match='no kernel "turbo" in the kernel table'):
        device.kernel(replace(COPY, name="turbo"))
    with pytest.raises(DeviceError, match=r"gemv_norm takes 2 constants \(bits group\), 1 were given"):
        device.kernel(KERNELS["gemv_norm"], [4])


def test_a_function_that_the_shaders_lack_is_named(metal: Standin, opened: Open) -> None:
    def compile(_: str, name: str, __: dict[int, int]) -> Kernel:
        raise AssertionError(f"no function {name}")

    metal.run_kernels(compile)
    with pytest.raises(DeviceError, match="give no kernel copy: no function copy"):
        opened().kernel(COPY)


LIMITS: dict[str, tuple[dict[str, float], str]] = {
    "no pipeline": ({"fail_pipeline": 1}, "no pipeline of kernel copy: made to fail"),
    "another simd width": ({"simd_width": 64}, "simdgroups of 64 threads; the shaders need 32"),
    "too much threadgroup memory": ({"static_memory": 40000}, "needs 40000 bytes of threadgroup memory.*has 32768"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_pipeline_beyond_the_gpus_limits_is_refused(case: str, metal: Standin, opened: Open) -> None:
    settings, message = LIMITS[case]
    metal.set(**settings)
    with pytest.raises(DeviceError, match=message):
        opened().kernel(COPY)


def test_a_pipeline_that_allows_too_few_threads_is_built_again_for_more(metal: Standin, work: Work) -> None:
    metal.set(pipeline_threads=256)
    for threads in (256, 512, 512):
        work.record(dispatch(threads=threads))
    assert (work.device.info["pipelines"], work.device.info["rebuilt"]) == (2, 1)
    work.device.wait(work.device.submit(work.lists))


def test_more_threads_than_the_gpu_can_have_are_refused(metal: Standin, work: Work) -> None:
    metal.set(pipeline_threads=256, most_threads=384)
    with pytest.raises(DeviceError, match=r"copy cannot have 512 threads .* at most 256"):
        work.record(dispatch(threads=512))


# ---- lists ----
WRONG_SIZES = {
    "no whole simdgroup": (dispatch(threads=33), "33 x 1 x 1 threads"),
    "too many threads": (dispatch(threads=2048), "multiples of 32 up to 1024"),
    "no group": (dispatch(grid=0), "a grid of 0 x 1 x 1"),
    "an offset that is not aligned": (replace(dispatch(), views=(View("a", 8, 8), View("b", 0, 8))), "multiple of 16"),
    "an offset beyond the end": (
        replace(dispatch(), views=(View("a", 2048, 0), View("b", 0, 8))),
        "beyond the 1024 bytes",
    ),
    "a missing buffer": (replace(dispatch(), views=(View("a", 0, 8),)), "takes 2 buffers, 1 were given"),
}


@pytest.mark.parametrize("case", WRONG_SIZES)
def test_a_wrong_dispatch_is_refused_when_it_is_recorded(case: str, work: Work) -> None:
    wrong, message = WRONG_SIZES[case]
    out = CommandList(work.device, "wrong")
    work.lists.append(out)
    with pytest.raises(DeviceError, match=message):
        record_into(work, out, wrong)


def record_into(work: Work, out: CommandList, d: Dispatch) -> None:
    from lily.device import _Arg, _U32x3, pack_params

    args = (_Arg * len(d.views))(*(_Arg(work.buffers[v.buffer].handle, v.offset) for v in d.views))
    params = pack_params(d.kernel, d.params)
    work.device._check(
        work.device.lib.lily_list_dispatch(
            out.handle, work.device.kernel(d.kernel), args, len(args), params, len(params), _U32x3(*d.grid),
            _U32x3(*d.threads), d.barrier,
        )
    )  # fmt: skip


def test_a_list_is_one_concurrent_encoder_with_barriers_only_where_the_plan_has_them(
    metal: Standin, work: Work
) -> None:
    recorded = work.record(dispatch(), dispatch(dst="c"), dispatch(src="b", dst="d", barrier=True), dispatch(dst="b"))
    work.device.wait(work.device.submit([recorded]))
    assert sent(metal) == ["encoder", "dispatch", "dispatch", "barrier", "dispatch", "dispatch", "commit"]


def test_lists_of_one_submission_share_a_command_buffer_with_a_barrier_between(metal: Standin, work: Work) -> None:
    first, second = work.record(dispatch()), work.record(dispatch(), dispatch(barrier=True))
    work.device.wait(work.device.submit([first, second]))
    expected = ["encoder", "dispatch", "barrier", "dispatch", "barrier", "dispatch", "commit"]
    assert sent(metal) == expected
    start = len(metal.journal)
    work.device.wait(work.device.submit([first, second]))
    assert sent(metal, start) == expected


def test_an_unfinished_list_or_one_of_another_device_is_refused(opened: Open, work: Work) -> None:
    unended = CommandList(work.device, "unended")
    work.lists.append(unended)
    with pytest.raises(DeviceError, match="list 0 of the submission was not ended"):
        work.device.submit([unended])
    other = opened()
    with pytest.raises(DeviceError, match="belongs to another device"):
        other.submit([work.record(dispatch())])
    ended = work.record(dispatch())
    with pytest.raises(DeviceError, match="this list has ended; record a new one"):
        record_into(work, ended, dispatch())
    with pytest.raises(DeviceError, match="has ended already"):
        work.device._check(work.device.lib.lily_list_end(ended.handle))


# ---- submission ----
def test_tickets_count_up_and_finish_in_order(metal: Standin, work: Work) -> None:
    metal.set(delay_us=2000)
    recorded = work.record(dispatch())
    tickets = [work.device.submit([recorded]) for _ in range(5)]
    assert tickets == [1, 2, 3, 4, 5]
    assert work.device.wait(3)
    assert work.device.lib.lily_completed(work.device.handle) >= 3
    assert work.device.wait(5)
    assert [work.device.seconds(t) >= 0 for t in (0, 1, 5, 6)] == [False, True, True, False]


def test_a_submission_of_nothing_finishes(work: Work) -> None:
    assert work.device.wait(work.device.submit([]))


def test_waiting_runs_out_of_time_and_can_be_resumed(metal: Standin, work: Work) -> None:
    metal.set(delay_us=200_000)
    ticket = work.device.submit([work.record(dispatch())])
    began = time.monotonic()
    assert not work.device.wait(ticket, 0.02)
    assert time.monotonic() - began < 0.15
    assert work.device.wait(ticket)


def test_a_ticket_that_was_never_given_is_an_error(work: Work) -> None:
    with pytest.raises(DeviceError, match="ticket 7 was never given; the last one is 0"):
        work.device.wait(7)


def test_more_submissions_than_are_remembered_are_refused(metal: Standin, work: Work) -> None:
    metal.set(delay_us=20_000)
    recorded = work.record(dispatch())
    for _ in range(32):
        work.device.submit([recorded])
    with pytest.raises(DeviceError, match="32 submissions are unfinished; wait for a ticket first"):
        work.device.submit([recorded])
    assert work.device.wait(32)
    assert work.device.wait(work.device.submit([recorded]))


def test_command_buffers_that_share_no_memory_may_overlap_and_the_others_do_not(metal: Standin, work: Work) -> None:
    """The stand-in runs unordered command buffers last first: only sharing a tracked buffer keeps their order."""
    metal.set(order=1, delay_us=20_000)
    recorded = [work.record(dispatch(src="a", dst="b")), work.record(dispatch(src="b", dst="c"))]
    tickets = [work.device.submit([x]) for x in recorded]
    assert work.device.wait(tickets[-1])


def test_untracked_memory_would_be_reported_as_a_race(metal: Standin, work: Work) -> None:
    """The check of the test before can fail: without tracking, the same two submissions are unordered."""
    metal.set(order=1, delay_us=20_000, untracked=1)
    shared = work.device.buffer(BYTES)
    work.buffers["b"].free()
    work.buffers["b"] = shared
    recorded = [work.record(dispatch(src="a", dst="b")), work.record(dispatch(src="b", dst="c"))]
    blocker = work.device.submit([recorded[0]])
    tickets = [work.device.submit([x]) for x in recorded]
    for ticket in (blocker, *tickets):
        work.device.wait(ticket)
    assert any(line.startswith("race: command buffers") for line in metal.complaints)
    metal.lib.standin_reset()


# ---- pieces: what the watchdog allows ----
def long_list(work: Work, levels: int = 8) -> CommandList:
    return work.record(*(dispatch(barrier=i > 0, grid=100_000) for i in range(levels)))


def commits(metal: Standin) -> int:
    return sum(line.startswith("commit") for line in metal.journal)


def test_a_list_that_may_run_too_long_is_cut_at_barriers_only(metal: Standin, opened: Open) -> None:
    # 8 levels of 2 × 3.2e6 threads at the guessed 15 ns are 96 ms each.
    w = Work(opened(slice_ms=200))
    pairs = [d for i in range(8) for d in (dispatch(barrier=i > 0, grid=100_000), dispatch(dst="c", grid=100_000))]
    w.device.wait(w.device.submit([w.record(*pairs)]))
    level = ["dispatch", "dispatch"]
    piece = ["encoder", *level, "barrier", *level, "barrier", *level, "commit"]
    assert sent(metal) == [*piece, *piece, "encoder", *level, "barrier", *level, "commit"]
    w.close()


def test_a_list_that_was_measured_to_be_short_is_not_cut_again(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=100))
    recorded = long_list(w)
    w.device.wait(w.device.submit([recorded]))
    first = commits(metal)
    w.device.wait(w.device.submit([recorded]))
    assert first > 1
    assert commits(metal) == first + 1
    w.close()


def test_a_slice_of_zero_never_cuts(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=0))
    w.device.wait(w.device.submit([long_list(w)]))
    assert commits(metal) == 1
    w.close()


def test_a_submission_has_a_limited_number_of_command_buffers(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=1))
    w.device.wait(w.device.submit([long_list(w, levels=200)]))
    assert 40 <= commits(metal) <= 60
    w.close()


# ---- failure ----
FAILURES = {
    "interactivity": (1, "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        "kept the screen waiting.*smaller pieces"),
    "timeout": (2, "Caused GPU Timeout Error", "took too long.*smaller pieces"),
    "memory": (8, "Insufficient Memory", "ran out of memory.*smaller max_context"),
    "page fault": (3, "Caused GPU Address Fault Error", "has not been given.*lily doctor"),
    "stack": (12, "", "ran out of stack"),
    "resource": (9, "", "freed before its use"),
    "another program": (5, "Innocent Victim (kIOGPUCommandBufferCallbackErrorInnocentVictim)",
        "another program.*try again"),
    "unknown": (77, "something new", r"reported an error.*\(something new, code 77\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_command_buffer_tells_cause_place_and_remedy(case: str, metal: Standin, work: Work) -> None:
    code, text, message = FAILURES[case]
    metal.set(fail_submission=1, fail_code=code, fail_text=text)
    recorded = work.record(dispatch())
    ticket = work.device.submit([recorded])
    with pytest.raises(DeviceError, match=f"(?s){message}") as caught:
        work.device.wait(ticket)
    assert "in 1 dispatches from copy to copy" in str(caught.value)
    assert work.device.wait(ticket), "a failure is told once"
    assert work.device.wait(work.device.submit([recorded])), "later work may succeed"


LOSSES = {
    "revoked": (4, "Ignored (for causing prior/excessive GPU errors)", "start the program again"),
    "not permitted": (7, "Insufficient Permission", "--device cpu"),
    "removed": (11, "", "the GPU is gone"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_device_that_is_lost_takes_no_more_work(case: str, metal: Standin, work: Work) -> None:
    code, text, message = LOSSES[case]
    metal.set(fail_submission=1, fail_code=code, fail_text=text)
    recorded = work.record(dispatch())
    with pytest.raises(DeviceError, match=message):
        work.device.wait(work.device.submit([recorded]))
    with pytest.raises(DeviceError, match=message):
        work.device.submit([recorded])


def test_work_that_ran_too_long_is_cut_finer_the_next_time(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=250))
    metal.set(fail_submission=1, fail_code=2)
    recorded = long_list(w, levels=2)  # 96 ms by the guess: one piece
    with suppress(DeviceError):
        w.device.wait(w.device.submit([recorded]))
    assert commits(metal) == 1
    assert w.device.info["slice_ms"] == 125
    for _ in range(4):
        metal.set(fail_submission=commits(metal) + 1)
        with suppress(DeviceError):
            w.device.wait(w.device.submit([recorded]))
    assert commits(metal) > 5
    w.close()


def test_a_failure_in_one_piece_fails_the_submission(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=50))
    metal.set(fail_submission=2, fail_code=3)
    with pytest.raises(DeviceError, match="has not been given"):
        w.device.wait(w.device.submit([long_list(w)]))
    w.close()


def test_metal_without_command_buffers_fails_the_submission(metal: Standin, work: Work) -> None:
    metal.set(fail_encoder=1)
    with pytest.raises(DeviceError, match="gave no command buffer"):
        work.device.wait(work.device.submit([work.record(dispatch())]))


def test_a_forked_process_is_told_to_open_its_own_device(work: Work) -> None:
    recorded = work.record(dispatch())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work.device.submit([recorded])
        except DeviceError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"which forked; open a device in this process" in os.read(read, 1000)
    os.close(read)


# ---- residency ----
def residency(metal: Standin) -> list[str]:
    return [line.removeprefix("residency ") for line in metal.journal if line.startswith("residency")]


def test_buffers_are_held_from_the_first_list_on_and_asked_for_while_in_use(metal: Standin, opened: Open) -> None:
    w = Work(opened(keep_s=60))
    assert residency(metal) == []
    w.record(dispatch())
    assert residency(metal) == ["commit 5", "request"]  # the list's parameters are the fifth buffer
    time.sleep(1.2)
    assert residency(metal)[2:] in (["request"] * 2, ["request"] * 3)
    w.buffers.pop("d").free()
    assert residency(metal)[-1] == "commit 4"
    w.close()
    assert residency(metal)[-1].startswith(("end", "commit"))


def test_memory_is_let_go_when_nothing_was_asked_for_and_taken_again_with_the_next_work(
    metal: Standin, opened: Open
) -> None:
    w = Work(opened(keep_s=1))
    recorded = w.record(dispatch())
    deadline = time.monotonic() + 5
    while "end" not in residency(metal) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert residency(metal)[-1] == "end"
    w.device.wait(w.device.submit([recorded]))
    assert residency(metal)[-1] == "request"
    w.close()


# ---- the cache of pipelines ----
def test_pipelines_are_found_again_by_the_next_device(opened: Open, cache: Path) -> None:
    for hits in (0, 1):
        device = opened(cache=cache)
        device.kernel(COPY)
        info = device.info
        assert (info["cache"], info["cache_hits"], info["pipelines"]) == ("on", hits, 1)
        device.close()
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_shaders_have_another_cache(opened: Open, cache: Path, source: Path) -> None:
    for text in ("kernel void copy() {}", "kernel void copy() { }"):
        source.write_text(text)
        device = opened(cache=cache)
        device.kernel(COPY)
        assert device.info["cache_hits"] == 0
        device.close()
    assert len(list(cache.iterdir())) == 2


def test_files_of_other_versions_are_removed_after_a_month(opened: Open, cache: Path) -> None:
    for name, days in (("pipelines-old", 40), ("pipelines-new", 20), ("notes", 40)):
        (cache / name).write_text("")
        os.utime(cache / name, (time.time() - days * 86400,) * 2)
    opened(cache=cache)
    assert {p.name for p in cache.iterdir()} == {"pipelines-new", "notes"}


def test_a_cache_that_others_can_read_is_not_used(opened: Open, cache: Path) -> None:
    cache.chmod(0o755)
    assert opened(cache=cache).info["cache"] == f"off: {cache} is open to other users (chmod 700)"


def test_without_an_option_the_cache_is_the_users(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "Library" / "Caches").mkdir(parents=True)
    libc: Any = ctypes.CDLL(None)
    with environment("HOME", str(tmp_path)):
        libc.setenv(b"HOME", str(tmp_path).encode(), 1)
        assert opened(cache=None).info["cache"] == "on"
        assert (tmp_path / "Library" / "Caches" / "lily").stat().st_mode & 0o777 == 0o700
        libc.setenv(b"HOME", b"/nowhere", 1)
        assert re.match("off: cannot create the folder", opened(cache=None).info["cache"])
        libc.unsetenv(b"HOME")
        assert opened(cache=None).info["cache"] == "off: HOME is not set"


def test_a_file_in_place_of_the_cache_folder_is_told(opened: Open, cache: Path) -> None:
    (cache / "file").write_text("")
    assert opened(cache=cache / "file").info["cache"].endswith("is no folder")


@pytest.mark.parametrize(("how", "state"), [(1, "on"), (2, "off: made to fail"), (3, "off: made to fail"), (4, "on")])
def test_a_cache_that_fails_costs_only_time(how: int, state: str, metal: Standin, opened: Open, cache: Path) -> None:
    first = opened(cache=cache)
    first.kernel(COPY)
    first.close()
    metal.set(fail_archive=how)
    device = opened(cache=cache)
    device.kernel(KERNELS["last_row"])
    assert device.info["cache"] == state
    device.close()
    assert not [p for p in cache.iterdir() if "." in p.name], "a partial file was left"


# ---- captures ----
def test_one_submission_is_captured_for_xcode(metal: Standin, opened: Open, tmp_path: Path) -> None:
    target = tmp_path / "token.gputrace"
    w = Work(opened(capture=target))
    for _ in range(3):
        w.device.wait(w.device.submit([w.record(dispatch())]))
    order = [line for line in metal.journal if line.startswith(("capture", "commit"))]
    assert order == ["commit 1", "capture starts", "commit 2", "capture ends", "commit 3"]
    assert target.exists()
    w.close()


def test_the_environment_can_ask_for_a_capture(metal: Standin, opened: Open, tmp_path: Path) -> None:
    with environment("LILY_METAL_CAPTURE", str(tmp_path / "x.gputrace")):
        w = Work(opened(capture_ticket=1))
    w.device.wait(w.device.submit([w.record(dispatch())]))
    assert (tmp_path / "x.gputrace").exists()
    w.close()


def test_a_capture_that_metal_refuses_is_an_error(metal: Standin, opened: Open, tmp_path: Path) -> None:
    metal.set(fail_capture=1)
    with pytest.raises(DeviceError, match="METAL_CAPTURE_ENABLED=1"):
        opened(capture=tmp_path / "x")
    metal.set(fail_capture=2)
    w = Work(opened(capture=tmp_path / "x", capture_ticket=1))
    with pytest.raises(DeviceError, match="cannot be written: made to fail"):
        w.device.wait(w.device.submit([w.record(dispatch())]))
    w.close()


# ---- leaks ----
def test_a_thousand_steps_leave_no_object_and_need_no_outer_pool(
    metal: Standin, work: Work, capfd: pytest.CaptureFixture[str]
) -> None:
    metal.set(journal=0)
    recorded = [work.record(dispatch(), dispatch(barrier=True)), work.record(dispatch())]
    before = None
    for step in range(1000):
        work.device.wait(work.device.submit(recorded))
        if step == 10:
            before = metal.live
    deadline = time.monotonic() + 2
    while metal.live != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metal.live == before
    assert capfd.readouterr().err == ""  # GNUstep says there what was autoreleased without a pool
