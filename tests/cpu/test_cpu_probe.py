# SPDX-License-Identifier: Apache-2.0
"""The probes of ``lily doctor`` on every path of the CPU device, against integers that float32 holds exactly.

Not handled: whether they reach what the machine can do (bench/), the report (test_doctor.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import fill, run

from lily.device.device import Device


def test_level_counts(device: Device) -> None:
    x = np.array([41, 7, 7, 7], np.uint32)
    np.testing.assert_array_equal(run(device, "probe_level", {"x": x})["x"], [42, 7, 7, 7])


@pytest.mark.parametrize("size", [16, 240, 256, 272, 4096, 4112, 70_000])
@pytest.mark.parametrize("block", [64, 1024, 4096])
def test_read_sums_every_word_of_its_block_once(device: Device, size: int, block: int) -> None:
    src = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    groups = -(-size // block)
    args = {"src": src, "sums": fill(groups, np.uint32)}
    got = run(device, "probe_read", args, {"bytes": size, "block": block}, grid=(groups,))["sums"]
    padded = np.concatenate([src, np.zeros(-size % block, np.uint8)]).view(np.uint32).reshape(groups, -1)
    np.testing.assert_array_equal(got, padded.sum(1, dtype=np.uint32))


def test_read_groups_beyond_the_end_are_zero(device: Device) -> None:
    args = {"src": np.full(64, 1, np.uint8), "sums": fill(3, np.uint32)}
    got = run(device, "probe_read", args, {"bytes": 64, "block": 64}, grid=(3,))["sums"]
    np.testing.assert_array_equal(got, [16 * 0x01010101 % (1 << 32), 0, 0])


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_matrix_adds_the_same_product_in_every_round(device: Device, rounds: int) -> None:
    r = np.random.default_rng(rounds)
    x, w = r.integers(-8, 9, (2, 64, 64)).astype(np.float32)
    args = {"x": x, "w": w, "y": fill((3, 64, 64))}
    got = run(device, "probe_matrix", args, {"rounds": rounds}, grid=(3,))["y"]
    np.testing.assert_array_equal(got, np.broadcast_to(rounds * (x.astype(float) @ w.T), got.shape))
