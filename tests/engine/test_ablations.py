# SPDX-License-Identifier: Apache-2.0
"""A mechanism that is switched off changes the plan, and on the CPU device not one bit of the result.

But for ``fused-dequantisation``, which rounds weights to bfloat16: there the result stays near, as on other
devices with every mechanism that is more than an order of work.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_device import current
from engine_harness import assert_same_logits, forced_logits, open_engine
from models import all_experts

import lily
from lily.checkpoint.config import ModelConfig
from lily.checkpoint.resolve import resolve_model
from lily.plan import Builder, decode_plan, prefill_plan
from lily.policy import ABLATIONS, policy_for

# Nothing of a plan shows them: who waits for a token, and what only the lists' order tells.
UNSEEN = {"handoff"}
# No CPU route has them: long-context layouts, and tiles that are 32 rows at any load.
NOT_ON_CPU = {"fixed-blocks"}
ROUNDED = "fused-dequantisation"
EXACT = [name for name in ABLATIONS if name != ROUNDED]
# Two chunks, the second of them partly filled; every token of the vocabulary's beginning.
LONG = [i * 7919 % 900 for i in range(600)]


# They choose who waits for whom, or who does a piece of bookkeeping, and change no bit on any device.
ORDER_ONLY = {"overlap", "handoff", "resident-routing"}


@pytest.fixture(scope="module")
def model(device, tmp_path_factory):
    """The embedded model where bits are compared, else one of which rounding changes no choice."""
    return None if device.exact else all_experts(tmp_path_factory.mktemp("all") / "m")


def outcome(model, ablate):
    """(tokens of a greedy reply, logits of a prompt's last row and of the steps that are forced behind it)."""
    with open_engine(model, max_context=512, ablate=ablate) as engine:
        assert engine.info["ablate"] == sorted(ablate)
        count = current().pick(24, 6)
        reply = engine.generate("Once upon a time", max_tokens=count, temperature=0.0, ignore_eos=True).token_ids
    with open_engine(model, max_context=512, ablate=sorted({*ablate, "handoff"})) as engine:
        text = LONG[:20]
        return reply, forced_logits(engine, text, len(text) - current().pick(10, 3))


@pytest.fixture(scope="module")
def expected(model):
    return outcome(model, [])


def check(found, expected, exact):
    if exact:
        assert found[0] == expected[0]
        assert found[1].tobytes() == expected[1].tobytes()
    else:
        assert_same_logits(found[1], expected[1])


@pytest.mark.parametrize("name", EXACT)
def test_result_is_the_same_without_the_mechanism(device, model, name, expected):
    check(outcome(model, [name]), expected, device.exact or name in ORDER_ONLY)


def kernels_of(device, ablate):
    config = ModelConfig.from_file(resolve_model(None).path / "config.json")
    policy = policy_for(device, ablate)
    kv_tokens = max(policy.kv_step, policy.long_context if policy.long_context < 1 << 40 else 0)
    plans = [decode_plan(Builder(config, policy, kv_tokens=kv_tokens))]
    plans += [prefill_plan(Builder(config, policy, rows=policy.buckets[-1], kv_tokens=kv_tokens))]
    return [(d.kernel.name, d.barrier, d.constants, d.params, d.host) for plan in plans for d in plan.dispatches]


@pytest.mark.parametrize("planned", ["cpu", "metal"])
@pytest.mark.parametrize("name", sorted(set(ABLATIONS) - UNSEEN))
def test_plan_changes_without_the_mechanism(planned, name):
    if planned == "cpu" and name in NOT_ON_CPU:
        assert kernels_of(planned, (name,)) == kernels_of(planned, ())
    else:
        assert kernels_of(planned, (name,)) != kernels_of(planned, ())


def test_all_exact_mechanisms_off_at_once(device, model, expected):
    check(outcome(model, EXACT), expected, device.exact)


def scores(*ablate):
    with open_engine(None, max_context=1024, ablate=ablate) as engine:
        return engine.score(LONG, top_k=4)


def test_a_host_that_routes_changes_no_bit_of_a_score_of_several_chunks():
    on, off = scores(), scores("resident-routing")
    assert on.logprobs.tobytes() == off.logprobs.tobytes()
    assert on.top_ids.tobytes() == off.top_ids.tobytes()
    assert on.top_logprobs.tobytes() == off.top_logprobs.tobytes()


def test_a_host_that_routes_serves_replies_that_go_on_from_either_slot():
    """Odd and even numbers of chunks and steps, a prompt that shares the beginning of the one before."""
    replies = []
    for ablate in ((), ("resident-routing",)):
        with open_engine(None, max_context=1024, ablate=ablate) as engine:
            for end, steps in ((5, 4), (9, 3), (520, 2), (530, 1), (12, 5)):
                options = {"max_tokens": steps, "temperature": 1.0, "seed": 5, "logprobs": 2, "ignore_eos": True}
                done = engine.generate(LONG[:end], **options)
                replies.append((ablate, end, done.cached_tokens, done.token_ids, done.logprobs))
    half = len(replies) // 2
    assert [r[1:] for r in replies[:half]] == [r[1:] for r in replies[half:]]
    assert any(r[2] for r in replies)


def test_expanded_matrices_give_nearly_the_same_scores():
    """bf16 arithmetic as such moves lily-tiny's logits by 0.02 on average, and some choices of experts with them."""
    on, off = scores(), scores(ROUNDED)
    assert 0 < np.abs(on.logprobs - off.logprobs).mean() < 0.05
    assert (on.top_ids[:, 0] == off.top_ids[:, 0]).mean() > 0.97
    # A state that decode steps made, with unrounded weights, must not serve a prompt.
    assert policy_for("cpu").rows_invariant
    assert not policy_for("cpu", (ROUNDED,)).rows_invariant


def test_the_expanded_stack_counts_in_the_memory_that_an_engine_asks_for():
    def scratch(*ablate):
        with open_engine(None, max_context=512, ablate=ablate) as engine:
            return engine.memory.scratch, engine.config

    (on, c), (off, _) = scratch(), scratch(ROUNDED)
    stack = c.num_experts * 2 * c.moe_intermediate_size * c.hidden_size * 2
    halves = 2 * policy_for("cpu").buckets[-1] * c.experts_per_token * c.moe_intermediate_size * 4
    assert stack <= off - on <= stack + halves + 4096


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(lily.InvalidRequestError, match=r"unknown ablation 'speed'; known: overlap, handoff, .*"):
        policy_for("cpu", ("speed",))
