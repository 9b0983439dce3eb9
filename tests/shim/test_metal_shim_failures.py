# SPDX-License-Identifier: Apache-2.0
"""What the Metal shim says when Metal fails, and captures for Xcode.

It runs under GNUstep against the stand-in of tests/metal/.  Not handled: what kernels compute.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from engine_harness import environment
from metal.shim import Open, Work, commits, dispatch, long_list
from metal.standin import Standin

from lily.errors import DeviceError

# ---- failure ----
FAILURES = {
    "interactivity": (1, "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        "kept the screen waiting.*smaller parts"),
    "timeout": (2, "Caused GPU Timeout Error", "took too long.*smaller parts"),
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


def test_a_failure_is_that_of_its_submission_alone(metal: Standin, work: Work) -> None:
    """Of 64 submissions each has a record; the second that fails here has the first one's."""
    recorded = work.record(dispatch())
    for number in range(1, 140):
        metal.set(fail_submission=number if number in (2, 66) else 0)
        ticket = work.device.submit([recorded])
        if number in (2, 66):
            with pytest.raises(DeviceError, match="reported an error"):
                work.device.wait(ticket)
        else:
            assert work.device.wait(ticket)


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
    with pytest.raises(DeviceError, match="MTL_CAPTURE_ENABLED=1"):
        opened(capture=tmp_path / "x")
    metal.set(fail_capture=2)
    w = Work(opened(capture=tmp_path / "x", capture_ticket=1))
    with pytest.raises(DeviceError, match="cannot be written: made to fail"):
        w.device.wait(w.device.submit([w.record(dispatch())]))
    w.close()
