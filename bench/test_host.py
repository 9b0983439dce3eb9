# SPDX-License-Identifier: Apache-2.0
"""Host time per decoded token: the real model's plan on a device that completes submissions without running kernels.

Needs the real config (LILY_TEST_DATA); the 19.5 GB of weight buffers are reserved but never touched.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lily.checkpoint.config import ModelConfig
from lily.device.device import Device
from lily.device.weights import Weights
from lily.plan.weights_map import map_weights
from lily.policy import policy_for
from lily.run.runner import Runner
from lily.sampling import SamplingParams

STEPS = 500
LIMIT_SECONDS = 50e-6


@pytest.fixture(scope="module")
def runner():
    data = os.environ.get("LILY_TEST_DATA")
    if not data:
        pytest.skip("LILY_TEST_DATA is not set: no config of the real model")
    config = ModelConfig.from_file(Path(data) / "config.json")
    policy = policy_for("cpu")
    weights = map_weights(config, policy)
    with Device("cpu", null=1, threads=1) as device:
        runner = Runner(device, config, policy, Weights(device, weights), vocab=248_077)
        yield runner
        runner.close()


def test_host_time_per_token(benchmark, runner):
    """≤ 50 µs from one token to the next, submission, wait and hand-over included."""
    params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)

    sequence = runner.sequence(max_context=8192)

    def start():
        sequence.reset()
        reply = runner.start(sequence, [1, 2, 3], params, (), STEPS + 1)
        reply.next()
        return (reply,), {}

    def decode(reply):
        for _ in range(STEPS):
            reply.next()
        reply.stop()

    benchmark.pedantic(decode, setup=start, rounds=7, warmup_rounds=1)
    per_token = np.median(benchmark.stats.stats.data) / STEPS
    benchmark.extra_info["microseconds per token"] = round(per_token * 1e6, 2)
    assert per_token <= LIMIT_SECONDS
