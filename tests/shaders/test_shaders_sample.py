# SPDX-License-Identifier: Apache-2.0
"""Sampling shaders: the tests of sampling_tests.py, orders of threads, checked runs.

Not handled: the filters (test_shaders_sample_filter.py).
"""

from __future__ import annotations

from functools import partial

import msl_harness
import numpy as np
import pytest
from kernel_calls import RunCall
from msl_harness import (
    ORDERS,
    needs_emulator,
    needs_shaders,
    request,
    run_call_fixture,  # noqa: F401
    run_many,
    slack_fixture,  # noqa: F401
    step,
)
from sampling_calls import (
    advance_call,
    argmax_call,
    draw_call,
    gumbel,
    logits_call,
    normal_logits,
    score_call,
    winner,
)
from sampling_tests import *  # noqa: F403
from sampling_tests import argmax, check_noise, draw

pytestmark = needs_shaders


def test_noise_is_accurate_at_both_ends_of_the_uniform(run_call: RunCall, slack: float) -> None:
    check_noise(run_call, slack, 1 << 17)


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_runs_clean_when_checked(order: str) -> None:
    logits, counts = normal_logits(300, 3), np.zeros(300, np.uint32)
    counts[::7] = 2
    req = request(290, repetition_penalty=1.5, repetition_window=5, presence_penalty=1, frequency_penalty=0.1)
    stats = np.array([[logits.max(), np.exp(logits - logits.max()).sum(), 0, 0]], np.float32)
    order_of = np.argsort(-logits[:100], kind="stable")[:20]
    for call in (
        argmax_call(logits, 290, 128),
        logits_call(logits, req, 128, np.arange(9) * 30, counts, {3: 1.0, 299: 2.0}, 4, 3),
        draw_call(logits, size=100, seed=3, cut=(0, 200), vocab=290),
        score_call(logits[None], np.array([5]), 3, 290, 1),
        advance_call(
            step(), [(1.0, 8)], request=request(100, top_logprobs=20), logits=logits[:100], stats=stats,
            top_ids=order_of.astype(np.int32), top_values=logits[order_of],
        ),
    ):  # fmt: skip
        run_many([call], checked=True, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_order_of_threads(order: str) -> None:
    run_call = partial(msl_harness.run_call, order=order)
    logits = np.round(normal_logits(900, 1), 1)
    assert winner(argmax(run_call, logits, 900, 256)[0]) == logits.argmax()
    want = logits.astype(float) + gumbel(900, 1, 11)
    assert winner(draw(run_call, logits, seed=11, size=256)) == want.argmax()
    order_of = np.argsort(-logits, kind="stable")[:7]
    top = run_call(score_call(logits[None], np.zeros(1), 7, 900, 1))["top_ids"][0]
    np.testing.assert_array_equal(top, order_of)
