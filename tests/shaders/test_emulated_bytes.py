# SPDX-License-Identifier: Apache-2.0
"""The bytes that a decode step of real shapes touches on the emulator, each once, against what the plan says.

Two layers of the 35B model, one of each kind, with all 256 experts, run from zeroed memory: which bytes are read
depends on sizes, position and the number of experts, not on values. The checks of the checked build run along.
Not handled: how often a byte is read again, which caches decide; prefill, whose traffic follows the routing.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from emulated_metal import EmulatedMetal, Traffic
from kernel_harness import request
from models import model_config
from msl_harness import needs_clang

from lily.checkpoint.config import ModelConfig
from lily.plan import Builder, Plan, decode_plan, sample_plan
from lily.plan.report import plan_report
from lily.plan.views import Dispatch
from lily.policy import policy_for
from lily.structs import STEP

pytestmark = needs_clang

MOST = 1.02  # of the plan's figure, for each kernel and in all
LEAST = 0.99  # of greedy decode: less would mean that a kernel skips its work, or that nobody counts

POLICY = policy_for("metal")
CONFIG = ModelConfig.from_dict(
    model_config(
        num_hidden_layers=2, full_attention_interval=2, num_experts=256, vocab_size=8192, max_position_embeddings=65536
    ),
    "config",
)  # fmt: skip


def plans_at(context: int) -> list[Plan]:
    """Decode, and each way of sampling."""

    def builder() -> Builder:
        return Builder(CONFIG, POLICY, rows=1, kv_tokens=POLICY.kv_tokens(context), context=context)

    ways = ((True, False), (False, False), (False, True))
    return [decode_plan(builder()), *(sample_plan(builder(), greedy=g, logprobs=p) for g, p in ways)]


def run(plans: list[Plan], context: int) -> list[tuple[Dispatch, Traffic]]:
    """The dispatches of all plans, and what each moved when the token at ``context - 1`` was computed."""
    sizes: dict[str, int] = defaultdict(int)
    for plan in plans:
        for name, size in [*plan.buffers.items(), ("scratch", plan.scratch_bytes)]:
            sizes[name] = max(sizes[name], size)
    asked = request(CONFIG.vocab_size, temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, top_logprobs=20)
    with EmulatedMetal(checked=True) as device:
        buffers = {name: device.buffer(size) for name, size in sizes.items()}
        buffers["step.in"].array(STEP)[0] = (context - 1, 1, 0, 0)
        buffers["request"].bytes[:] = np.frombuffer(asked.tobytes(), np.uint8)
        device.wait(device.submit([device.record(plan, buffers) for plan in plans]))
        traffic = device.traffic(plans)
    return list(zip((d for plan in plans for d in plan.dispatches), traffic, strict=True))


def check(context: int) -> None:
    plans = plans_at(context)
    moved = iter(run(plans, context))
    for plan in plans:
        counted, planned = defaultdict(int), defaultdict(int)
        for _ in plan.dispatches:
            d, traffic = next(moved)
            counted[d.kernel.name] += traffic.distinct_read + traffic.distinct_written
            planned[d.kernel.name] += d.bytes_read + d.bytes_written
        beyond = {name: counted[name] / planned[name] for name in planned if counted[name] > MOST * planned[name]}
        assert beyond == {}
        share = sum(counted.values()) / plan.bytes
        assert share <= MOST
        # The plan counts all of the bias list and of the history; how much of them a request uses is its affair.
        assert share >= LEAST or plan.name in ("sample", "sample-logprobs")


def test_a_decode_step_touches_the_bytes_of_its_plan() -> None:
    # Seen: 0.9997 (decode), 0.9999 (greedy), 0.9973 (sampling); no kernel above 1.
    check(4096)


@pytest.mark.full
def test_a_decode_step_at_a_long_context_touches_the_bytes_of_its_plan() -> None:
    """From ``long_context`` on, attention has its fixed-block layout."""
    assert POLICY.kv_tokens(32769) >= POLICY.long_context
    check(32769)


def test_the_figure_is_that_of_lily_plan() -> None:
    decode, greedy, *_ = plans_at(4096)
    assert plan_report(CONFIG, POLICY, context=4096)["bytes"] == decode.bytes + greedy.bytes
