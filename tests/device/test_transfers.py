# SPDX-License-Identifier: Apache-2.0
"""Memory that is a device's own: what the host reads, writes, copies and fills, and that the engine needs no more.

On the cpu device and on the shim, whose transfers are the same code; Metal itself is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from models import tiny_model

import lily.engine
from lily.device.device import Buffer, Device
from lily.engine import Engine
from lily.errors import DeviceError
from lily.policy import POLICIES

SIZE = 1000
COUNTED = (np.arange(SIZE) * 7 % 251).astype(np.uint8)
HOW: dict[str, Any] = {"max_tokens": 20, "seed": 7, "ignore_eos": True, "logprobs": 2}
PROMPT = [i * 37 % 900 + 1 for i in range(40)]


@pytest.fixture(params=["unified", "discrete"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with Device("cpu", threads=1, discrete=int(request.param == "discrete")) as device:
        yield device


@pytest.fixture
def buffer(device: Device) -> Iterator[Buffer]:
    made = device.buffer(SIZE, shared=False)
    yield made
    made.free()


def test_new_memory_is_zero_and_holds_what_is_written(buffer: Buffer) -> None:
    assert not buffer.read().any()
    buffer.write(COUNTED)
    assert np.array_equal(buffer.read(), COUNTED)
    assert np.array_equal(buffer.read(990), COUNTED[990:])
    assert np.array_equal(buffer.read(3, 5), COUNTED[3:8])
    buffer.write(np.array([1, 2], np.int32), 8)
    assert buffer.read(8, 8).view(np.int32).tolist() == [1, 2]
    assert np.array_equal(buffer.read(16), COUNTED[16:])
    buffer.fill(0xA5)
    assert set(buffer.read()) == {0xA5}
    buffer.fill()
    assert not buffer.read().any()


def test_copies_leave_the_rest(device: Device, buffer: Buffer) -> None:
    other = device.buffer(SIZE + 10, shared=True)
    other.fill(9)
    buffer.write(COUNTED)
    other.copy(buffer, 500)
    assert np.array_equal(other.bytes[:500], COUNTED[:500])
    assert set(other.bytes[500:]) == {9}
    other.copy(buffer, 0)
    buffer.copy(other, SIZE)
    assert np.array_equal(buffer.read(), other.bytes[:SIZE])
    buffer.copy(buffer, SIZE)
    assert np.array_equal(buffer.read(), other.bytes[:SIZE])
    other.free()


def test_ranges_of_one_buffer_may_overlap(device: Device, buffer: Buffer) -> None:
    buffer.write(COUNTED)
    device._check(device.lib.lily_buffer_copy(buffer.handle, 10, buffer.handle, 0, 900))
    assert np.array_equal(buffer.read(10, 900), COUNTED[:900])
    device._check(device.lib.lily_buffer_copy(buffer.handle, 0, buffer.handle, 10, 900))
    assert np.array_equal(buffer.read(0, 900), COUNTED[:900])


def test_what_is_filled_in_a_block_is_there_afterwards(buffer: Buffer) -> None:
    with buffer.filling(100, 50) as part:
        part[:] = COUNTED[:50]
    assert np.array_equal(buffer.read(100, 50), COUNTED[:50])
    assert not buffer.read(0, 100).any()
    assert not buffer.read(150).any()
    with pytest.raises(ZeroDivisionError), buffer.filling(0, 10):
        raise ZeroDivisionError
    assert not buffer.read(0, 100).any()


@pytest.mark.parametrize(("start", "nbytes"), [(0, SIZE + 1), (SIZE, 1), (SIZE + 1, 0), (2**64 - 1, 2), (1, 2**64 - 1)])
def test_ranges_beyond_a_buffer_are_refused_and_nothing_is_done(
    device: Device, buffer: Buffer, start: int, nbytes: int
) -> None:
    buffer.write(COUNTED)
    other = device.buffer(SIZE, shared=False)
    lib, outside = device.lib, np.zeros(SIZE + 1, np.uint8)
    for code in (
        lib.lily_buffer_fill(buffer.handle, start, nbytes, 1),
        lib.lily_buffer_read(buffer.handle, start, nbytes, outside.ctypes.data),
        lib.lily_buffer_write(buffer.handle, start, nbytes, outside.ctypes.data),
        lib.lily_buffer_copy(buffer.handle, start, other.handle, 0, nbytes),
        lib.lily_buffer_copy(other.handle, 0, buffer.handle, start, nbytes),
    ):
        with pytest.raises(DeviceError, match=rf"lily_buffer_\w+.* bytes at \d+ are not within a buffer of {SIZE}"):
            device._check(code)
    assert np.array_equal(buffer.read(), COUNTED)
    assert not other.read().any()
    other.free()


def test_the_host_sees_what_is_shared_alone() -> None:
    with Device("cpu", threads=1, discrete=1) as device:
        own, shared = device.buffer(SIZE, shared=False), device.buffer(SIZE)
        assert (own.address, bool(shared.address)) == (0, True)
        with pytest.raises(AssertionError, match="the device's own"):
            own.array(np.uint8)
        own.free()
        shared.free()
    with pytest.raises(DeviceError, match='option discrete is "yes"; allowed: 0, 1'):
        Device("cpu", discrete="yes")


def test_an_engine_needs_to_see_nothing_else(tmp_path: Any) -> None:
    """Loading, chunks in parts, growth, snapshots, copies, files: with the bits of a device whose memory it sees."""
    small = replace(
        POLICIES["cpu"], chunks=((0, 16),), buckets=(8, 16), kv_step=32, message_gap=1, part_rows=8, canonical=True
    )
    done = []
    with mock.patch.dict(POLICIES, cpu=small):
        for discrete in (0, 1):
            device = Device("cpu", threads=1, discrete=discrete)
            with (
                mock.patch.object(lily.engine, "open_checked", return_value=device),
                Engine(tiny_model(), device="cpu", max_context=256, sequences=2) as engine,
            ):
                replies = [engine.generate(PROMPT, **HOW)]
                replies.append(engine.generate([*PROMPT, *replies[0].token_ids, 5], **HOW))
                replies.append(engine.generate([*PROMPT[:35], 6, 7], **HOW))  # another conversation that begins alike
                assert replies[2].cached_tokens == 32
                assert engine.save_cache(tmp_path / str(discrete)) > 0
                engine.load_cache(tmp_path / str(discrete))
                scored = engine.score(PROMPT, top_k=2)
                replies.append(engine.generate([*PROMPT[:35], 6, 7, 8], **HOW))
                done.append([(r.token_ids, r.logprobs, r.cached_tokens) for r in replies])
                done[-1].append((scored.logprobs.tolist(), scored.top_ids.tolist(), 0))
    assert done[0] == done[1]
