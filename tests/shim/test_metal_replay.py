# SPDX-License-Identifier: Apache-2.0
"""Option replay=icb of the Metal shim: lists as indirect command buffers, on the stand-in of tests/metal/.

The stand-in refuses commands that were not recorded, pipelines that were not made for it and buffers that are not
resident; nothing but fences orders what indirect command buffers use.  Not handled: whole models
(test_metal_replay_engine.py); whether it is faster, which ``lily tune`` measures on a Mac.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from metal.shim import BYTES, COPY, Open, Work, check_steps_leave_nothing, commits, dispatch, sent
from metal.standin import Standin

from lily.errors import DeviceError


@pytest.fixture
def replaying(opened: Open) -> Iterator[Work]:
    w = Work(opened(replay="icb"))
    yield w
    w.close()


# ---- what is encoded
def test_a_list_is_named_where_it_would_be_encoded(metal: Standin, replaying: Work) -> None:
    recorded = replaying.record(dispatch(), dispatch(dst="c"), dispatch(src="b", dst="d", barrier=True))
    assert replaying.device.info["replay"] == "icb"
    start = len(metal.journal)
    for _ in range(3):
        replaying.device.wait(replaying.device.submit([recorded]))
    assert sent(metal, start) == ["encoder", "execute", "commit"] * 3


def test_between_two_lists_stands_a_barrier_of_the_encoder(metal: Standin, replaying: Work) -> None:
    lists = [replaying.record(dispatch()), replaying.record(dispatch(src="b", dst="c"))]
    start = len(metal.journal)
    replaying.device.wait(replaying.device.submit(lists))
    assert sent(metal, start) == ["encoder", "execute", "barrier", "execute", "commit"]


def test_an_empty_list_executes_nothing(metal: Standin, replaying: Work) -> None:
    replaying.device.wait(replaying.device.submit([replaying.record()]))
    assert "execute" not in sent(metal)


def test_a_list_that_may_run_too_long_is_cut_into_ranges(metal: Standin, opened: Open) -> None:
    # Levels of 2 x 3.2e6 threads at the guessed 15 ns are 96 ms each.
    w = Work(opened(replay="icb", slice_ms=200))
    pairs = [d for i in range(8) for d in (dispatch(barrier=i > 0, grid=100_000), dispatch(dst="c", grid=100_000))]
    w.device.wait(w.device.submit([w.record(*pairs)]))
    assert [line for line in metal.journal if line.startswith("execute")] == [
        "execute 0 6", "execute 6 6", "execute 12 4",
    ]  # fmt: skip
    assert commits(metal) == 3
    w.close()


def test_pipelines_are_made_for_it_in_this_mode_only_and_kept_apart(opened: Open, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for mode, hits in (("encode", 0), ("icb", 0), ("encode", 1), ("icb", 1)):
        device = opened(replay=mode, cache=cache)
        device.kernel(COPY)
        assert (device.info["cache_hits"], device.info["replay"]) == (hits, mode)
        device.close()
    assert len(list(cache.iterdir())) == 2


# ---- order and residency
def queue_three(metal: Standin, w: Work) -> None:
    recorded = [w.record(dispatch(src=a, dst=b)) for a, b in ("ab", "bc", "cd")]
    with metal.held():
        tickets = [w.device.submit([x]) for x in recorded]
    for ticket in tickets:
        w.device.wait(ticket)


def test_submissions_that_share_memory_are_ordered_by_fences(metal: Standin, replaying: Work) -> None:
    metal.set(order=1)
    queue_three(metal, replaying)


def test_without_fences_they_would_be_reported_as_a_race(metal: Standin, replaying: Work) -> None:
    """The check of the test before can fail: hazard tracking does not see what indirect command buffers use."""
    metal.set(order=1, unfenced=1)
    queue_three(metal, replaying)
    assert any(line.startswith("race: command buffers") for line in metal.complaints)
    metal.lib.standin_reset()


@pytest.mark.parametrize("keep_s", [0, 60])
def test_everything_is_resident_whether_memory_is_asked_for_ahead_or_not(
    keep_s: int, metal: Standin, opened: Open
) -> None:
    w = Work(opened(replay="icb", keep_s=keep_s))
    w.device.wait(w.device.submit([w.record(dispatch())]))
    w.buffers["b"].free()
    w.buffers["b"] = w.device.buffer(BYTES)
    w.device.wait(w.device.submit([w.record(dispatch())]))
    assert ("residency request" in metal.journal) == (keep_s > 0)
    w.close()


def test_a_buffer_that_no_residency_set_holds_is_reported(metal: Standin, opened: Open) -> None:
    """The check of the test before can fail."""
    metal.set(homeless=1)
    w = Work(opened(replay="icb"))
    w.device.wait(w.device.submit([w.record(dispatch())]))
    assert "copy: buffer 0 is not resident" in metal.complaints
    w.close()
    metal.lib.standin_reset()


# ---- refusals
REFUSED = {
    "no fence": ({"fail_indirect": 3}, "gave no fence; use replay=encode"),
    "no pipeline": ({"fail_indirect": 1}, "no pipeline of kernel copy: Compute function cannot be used with indirect"),
    "no buffer": ({"fail_indirect": 2}, "refused an indirect command buffer for 1 dispatches; use replay=encode"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_metal_refuses_is_told_with_the_way_out(case: str, metal: Standin, opened: Open) -> None:
    settings, message = REFUSED[case]
    metal.set(**settings)
    with pytest.raises(DeviceError, match=message):
        raise_from_recording(opened)


def raise_from_recording(opened: Open) -> None:
    w = Work(opened(replay="icb"))
    try:
        w.record(dispatch())
    finally:
        w.close()


def test_a_list_of_more_commands_than_metal_executes_at_once_is_refused(replaying: Work) -> None:
    with pytest.raises(DeviceError, match="a list of 16385 dispatches cannot be replayed, at most 16384"):
        replaying.record(*[dispatch()] * 16385)


def test_work_that_failed_is_told_and_the_list_runs_again(metal: Standin, replaying: Work) -> None:
    recorded = replaying.record(dispatch(), dispatch(barrier=True))
    metal.set(fail_submission=1, fail_code=3)
    with pytest.raises(DeviceError, match="in 2 dispatches from copy to copy"):
        replaying.device.wait(replaying.device.submit([recorded]))
    assert replaying.device.wait(replaying.device.submit([recorded]))


def test_lists_may_be_freed_after_the_device_was_closed(replaying: Work) -> None:
    replaying.device.wait(replaying.device.submit([replaying.record(dispatch())]))
    replaying.device.close()


# ---- leaks
def test_a_thousand_replays_leave_no_object(metal: Standin, replaying: Work, capfd: pytest.CaptureFixture[str]) -> None:
    lists = [replaying.record(dispatch(), dispatch(barrier=True)), replaying.record(dispatch())]
    check_steps_leave_nothing(metal, replaying, lists)
    assert capfd.readouterr().err == ""
