# SPDX-License-Identifier: Apache-2.0
"""Sampling kernels of the CPU device: the tests of sampling_tests.py on every path, and what is not for shaders.

Expected values: the published test vectors of Philox-4x32-10.  Not handled: the filters (test_cpu_sample_filter.py).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from kernel_calls import RunCall
from kernel_harness import isa_paths, open_device, same_bits
from kernel_harness import run_call as run_on
from sampling_calls import normal_logits, philox, winner
from sampling_tests import *  # noqa: F403
from sampling_tests import check_noise, draw
from scipy.stats import chisquare

from lily.device.device import Device


@pytest.fixture
def best_path() -> Device:
    return open_device()


def on(device: Device) -> RunCall:
    return partial(run_on, device)


@pytest.fixture
def run_call(device: Device) -> RunCall:
    return on(device)


@pytest.fixture
def slack() -> float:
    return 1


def test_the_reference_generator_has_the_published_vectors() -> None:
    for counter, key, want in (
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        np.testing.assert_array_equal(philox(np.array([counter], np.uint32), key)[0], np.array(want, np.uint32))


@pytest.mark.native("slow under emulation")
def test_noise_is_accurate_at_both_ends_of_the_uniform(run_call: RunCall, slack: float) -> None:
    check_noise(run_call, slack, 1 << 20)


def test_draw_does_not_depend_on_slices_threads_or_width(best_path: Device) -> None:
    y = normal_logits(5001, 1)
    want = winner(draw(on(best_path), y, seed=5))
    for size in (1, 7, 100, 333, 5001, 9000):
        assert winner(draw(on(best_path), y, seed=5, size=size)) == want
    for threads in (1, 3):
        other = open_device(best_path.info["isa"], threads)
        assert same_bits(draw(on(other), y, seed=5), draw(on(best_path), y, seed=5))
    for isa in isa_paths():
        assert winner(draw(on(open_device(isa)), y, seed=5)) == want


def test_draws_follow_the_distribution(best_path: Device) -> None:
    y = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])).astype(np.float32)
    n = 4000
    for temperature in (1.0, 0.5):
        p = np.exp(y.astype(float) / temperature)
        drawn = [winner(draw(on(best_path), y, temperature=temperature, position=i, seed=2024)) for i in range(n)]
        assert chisquare(np.bincount(drawn, minlength=8), n * p / p.sum()).pvalue > 0.001
