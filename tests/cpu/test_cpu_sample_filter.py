# SPDX-License-Identifier: Apache-2.0
"""sample_filter of the CPU device, on every path: the tests of sampling_filter_tests.py."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from kernel_calls import RunCall
from kernel_harness import run_call as run_on
from sampling_filter_tests import *  # noqa: F403
from sampling_filter_tests import clear_logits, sample_filter

from lily.device.device import Device


@pytest.fixture
def run_call(device: Device) -> RunCall:
    return partial(run_on, device)


@pytest.fixture
def slack() -> float:
    return 1


@pytest.mark.parametrize("scale", [0.01, 1, 4, 20])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.99999])
def test_top_p_is_exact(run_call: RunCall, scale: float, top_p: float) -> None:
    y, want, _ = clear_logits(scale, top_p, least=1e-7)
    np.testing.assert_array_equal(sample_filter(run_call, y, top_p=top_p), want)
