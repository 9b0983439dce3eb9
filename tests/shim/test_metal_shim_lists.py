# SPDX-License-Identifier: Apache-2.0
"""The Metal shim records lists and submits them: what is encoded, cut, ordered and left behind.

It runs under GNUstep against the stand-in of tests/metal/.  Not handled: what kernels compute.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from metal.shim import BYTES, Open, Work, check_steps_leave_nothing, commits, dispatch, long_list, record_into, sent
from metal.standin import Standin

from lily.device.device import CommandList
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, View

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


def test_a_list_is_one_concurrent_encoder_with_barriers_only_where_the_plan_has_them(
    metal: Standin, work: Work
) -> None:
    recorded = work.record(dispatch(), dispatch(dst="c"), dispatch(src="b", dst="d", barrier=True), dispatch(dst="b"))
    work.device.wait(work.device.submit([recorded]))
    assert sent(metal) == ["encoder", "dispatch", "dispatch", "barrier", "dispatch", "dispatch", "commit"]


def test_each_dispatch_runs_its_own_kernel(metal: Standin, opened: Open, tmp_path: Path) -> None:
    source = tmp_path / "two.metal"
    source.write_text("kernel void copy() {}\nkernel void swiglu() {}\n")
    w = Work(opened(source=source))
    assert kernels_of(metal, w, w.record(dispatch(), other(), other(), dispatch())) == [
        "copy", "swiglu", "swiglu", "copy",
    ]  # fmt: skip
    w.close()


def test_lists_grow_with_dispatches_of_different_sizes(metal: Standin, opened: Open, tmp_path: Path) -> None:
    """With 3 and 4 bindings a dispatch, every place at which a list's memory can end is met."""
    source = tmp_path / "two.metal"
    source.write_text("kernel void copy() {}\nkernel void swiglu() {}\n")
    w = Work(opened(source=source))
    for others in range(1, 14):
        recorded = w.record(*[other()] * others, *[dispatch()] * 23)
        assert kernels_of(metal, w, recorded) == ["swiglu"] * others + ["copy"] * 23
    w.close()


def other() -> Dispatch:
    """Another kernel than ``dispatch``'s, of one more argument."""
    views = tuple(View(buffer, 0, BYTES) for buffer in "abc")
    return replace(dispatch(), kernel=KERNELS["swiglu"], views=views, params=(1, 256))


def kernels_of(metal: Standin, w: Work, recorded: CommandList) -> list[str]:
    """What runs when a list is submitted."""
    start = len(metal.journal)
    w.device.wait(w.device.submit([recorded]))
    return [line.split()[1] for line in metal.journal[start:] if line.startswith("dispatch ")]


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
    with metal.held():
        ticket = work.device.submit([work.record(dispatch())])
        assert not work.device.wait(ticket, 0.02)
    assert work.device.wait(ticket)


def test_a_ticket_that_was_never_given_is_an_error(work: Work) -> None:
    with pytest.raises(DeviceError, match="ticket 7 was never given; the last one is 0"):
        work.device.wait(7)


def test_more_submissions_than_are_remembered_are_refused(metal: Standin, work: Work) -> None:
    recorded = work.record(dispatch())
    with metal.held():
        for _ in range(32):
            work.device.submit([recorded])
        with pytest.raises(DeviceError, match="32 submissions are unfinished; wait for a ticket first"):
            work.device.submit([recorded])
    assert work.device.wait(32)
    assert work.device.wait(work.device.submit([recorded]))


def test_command_buffers_that_share_no_memory_may_overlap_and_the_others_do_not(metal: Standin, work: Work) -> None:
    """The stand-in runs unordered command buffers last first: only sharing a tracked buffer keeps their order."""
    metal.set(order=1)
    recorded = [work.record(dispatch(src="a", dst="b")), work.record(dispatch(src="b", dst="c"))]
    with metal.held():
        tickets = [work.device.submit([x]) for x in recorded]
    assert work.device.wait(tickets[-1])


def test_untracked_memory_would_be_reported_as_a_race(metal: Standin, work: Work) -> None:
    """The check of the test before can fail: without tracking, the same two submissions are unordered."""
    metal.set(order=1, untracked=1)
    shared = work.device.buffer(BYTES)
    work.buffers["b"].free()
    work.buffers["b"] = shared
    recorded = [work.record(dispatch(src="a", dst="b")), work.record(dispatch(src="b", dst="c"))]
    with metal.held():
        blocker = work.device.submit([recorded[0]])
        tickets = [work.device.submit([x]) for x in recorded]
    for ticket in (blocker, *tickets):
        work.device.wait(ticket)
    assert any(line.startswith("race: command buffers") for line in metal.complaints)
    metal.lib.standin_reset()


# ---- pieces: what the watchdog allows ----
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


def test_a_thread_of_a_small_tile_counts_less(metal: Standin, opened: Open, tmp_path: Path) -> None:
    """At the guessed 15 ns, 8 levels of 6.4e6 threads are 768 ms; with a quarter of the rows each, 192 ms."""
    (tmp_path / "gemm.metal").write_text("kernel void gemm() {}\n")
    gemm, pieces = KERNELS["gemm"], {}
    for tile in (16, 64):
        w = Work(opened(slice_ms=200, source=tmp_path / "gemm.metal"))
        views = tuple(View("abcd"[i % 4], 0, BYTES) for i in range(len(gemm.args)))
        params = tuple(0 for _ in gemm.params)
        level = Dispatch(gemm, "gemm", (4, 64, tile), views, params, (50_000, 1, 1), (128, 1, 1))
        before = commits(metal)
        w.device.wait(w.device.submit([w.record(*(replace(level, barrier=i > 0) for i in range(8)))]))
        pieces[tile] = commits(metal) - before
        w.close()
    assert pieces == {16: 1, 64: 3}


def test_what_one_list_was_measured_to_take_replaces_the_guess_for_others(metal: Standin, opened: Open) -> None:
    w = Work(opened(slice_ms=200))  # pieces of less than 1e7 threads would say nothing about others
    w.device.wait(w.device.submit([long_list(w)]))
    first = commits(metal)
    w.device.wait(w.device.submit([long_list(w)]))
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


# ---- leaks ----
def test_a_thousand_steps_leave_no_object_and_need_no_outer_pool(
    metal: Standin, work: Work, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = [work.record(dispatch(), dispatch(barrier=True)), work.record(dispatch())]
    check_steps_leave_nothing(metal, work, lists)
    assert capfd.readouterr().err == ""  # GNUstep says there what was autoreleased without a pool
