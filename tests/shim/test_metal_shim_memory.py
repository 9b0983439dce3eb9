# SPDX-License-Identifier: Apache-2.0
"""The Metal shim's memory: buffers, limits, and how it is kept where the GPU reaches it.

It runs under GNUstep against the stand-in of tests/metal/.  Not handled: what kernels compute.
"""

from __future__ import annotations

import numpy as np
import pytest
from metal.shim import Open, Work, dispatch
from metal.standin import Standin
from waiting import until

from lily.errors import DeviceError


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


def test_what_is_transferred_is_there_for_the_gpu(opened: Open) -> None:
    """The same code as the cpu device's, whose tests look closer (test_transfers.py)."""
    device = opened()
    own, other = (device.buffer(100, shared=False) for _ in range(2))
    own.write(np.arange(100, dtype=np.uint8))
    other.copy(own, 60)
    assert other.read().tolist() == [*range(60), *[0] * 40] == other.bytes.tolist()
    other.fill(7)
    assert set(other.bytes) == {7}
    with pytest.raises(DeviceError, match="101 bytes at 0 are not within a buffer of 100"):
        other.read(0, 101)
    for buffer in (own, other):
        buffer.free()


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


# ---- residency ----
def residency(metal: Standin) -> list[str]:
    return [line.removeprefix("residency ") for line in metal.journal if line.startswith("residency")]


def test_buffers_are_held_from_the_first_list_on_and_asked_for_while_in_use(metal: Standin, opened: Open) -> None:
    w = Work(opened(keep_s=60))
    assert residency(metal) == []
    w.record(dispatch())
    assert residency(metal)[:2] == ["commit 5", "request"]  # the list's parameters are the fifth buffer
    until(lambda: len(residency(metal)) >= 4, "memory is asked for again and again")
    assert set(residency(metal)[2:]) == {"request"}
    w.buffers.pop("d").free()
    assert "commit 4" in residency(metal)
    w.close()
    assert residency(metal)[-1].startswith(("end", "commit"))


def test_memory_is_let_go_when_nothing_was_asked_for_and_taken_again_with_the_next_work(
    metal: Standin, opened: Open
) -> None:
    w = Work(opened(keep_s=1))
    recorded = w.record(dispatch())
    until(lambda: "end" in residency(metal), "memory is let go")
    assert residency(metal)[-1] == "end"
    seen = len(residency(metal))
    w.device.wait(w.device.submit([recorded]))
    assert residency(metal)[seen] == "request"
    w.close()
