# SPDX-License-Identifier: Apache-2.0
"""The sample_filter shader: the tests of sampling_filter_tests.py, orders of threads, checked runs, no numbers."""

from __future__ import annotations

from functools import partial

import msl_harness
import numpy as np
import pytest
from kernel_calls import RunCall
from msl_harness import ORDERS, needs_emulator, needs_shaders, run_call_fixture, slack_fixture  # noqa: F401
from sampling_calls import kept_by, normal_logits
from sampling_filter_tests import *  # noqa: F403
from sampling_filter_tests import clear_logits, sample_filter

pytestmark = needs_shaders


@pytest.mark.parametrize("scale", [0.01, 1, 4, 20])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.99999])
def test_top_p_is_exact(run_call: RunCall, scale: float, top_p: float, slack: float) -> None:
    y, want, margin = clear_logits(scale, top_p, least=1e-6)  # ten times what float32 sums of probabilities are off
    if margin < 1e-6 and slack > 1:
        pytest.skip("where ids have that little probability, the order of a GPU's sums decides between them")
    np.testing.assert_array_equal(sample_filter(run_call, y, top_p=top_p), want)


def test_a_small_top_p_is_taken_with_all_its_bits(run_call: RunCall) -> None:
    y = np.zeros(1 << 17, np.float32)
    for top_p, want in ((1 / 2**17, 1), (1.00001 / 2**17, 2), (2.00001 / 2**17, 3)):
        assert sample_filter(run_call, y, top_p=top_p).sum() == want


@pytest.mark.parametrize("order", ORDERS)
def test_filters_do_not_depend_on_the_order_of_threads(order: str) -> None:
    run_call = partial(msl_harness.run_call, order=order)
    y = np.round(normal_logits(700, 2), 2)
    for fields in ({"top_p": 0.9}, {"top_k": 33}):
        want, _ = kept_by(y, **fields)  # type: ignore[arg-type]
        np.testing.assert_array_equal(sample_filter(run_call, y, **fields), want)


@needs_emulator
def test_filters_run_clean_when_checked() -> None:
    y = np.round(normal_logits(300, 2), 1)
    run_call = partial(msl_harness.run_call, checked=True, order="random")
    sample_filter(run_call, y, 290, top_p=0.8, min_p=0.01)
    sample_filter(run_call, y, 290, top_k=30)


def test_logits_without_a_number_end_in_a_cut_that_keeps_nothing_new(run_call: RunCall) -> None:
    """A flagged step: whatever the result, the kernel ends and ``advance`` reports the step."""
    y = np.full(100, np.nan, np.float32)
    y[3] = 1
    assert sample_filter(run_call, y, top_p=0.5).sum() <= 1
