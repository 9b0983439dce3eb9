# SPDX-License-Identifier: Apache-2.0
"""A mechanism that is switched off changes the plan, and on the CPU device not one bit of the result."""

import pytest

import lily
from lily.config import ModelConfig
from lily.plan import Builder, decode_plan, prefill_plan
from lily.policy import ABLATIONS, policy_for
from lily.resolve import resolve_model

# Nothing of a plan shows them: who waits for a token, and what only the lists' order tells.
UNSEEN = {"handoff"}
# No CPU route has them: long-context layouts, and tiles that are 32 rows at any load.
NOT_ON_CPU = {"fixed-blocks"}


@pytest.fixture(scope="module")
def expected():
    with lily.Engine(max_context=512) as engine:
        return engine.generate("Once upon a time", max_tokens=24, temperature=0.0, ignore_eos=True).token_ids


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_result_is_the_same_without_the_mechanism(name, expected):
    with lily.Engine(max_context=512, ablate=[name]) as engine:
        assert engine.info["ablate"] == [name]
        found = engine.generate("Once upon a time", max_tokens=24, temperature=0.0, ignore_eos=True).token_ids
    assert found == expected


def kernels_of(device, ablate):
    config = ModelConfig.from_file(resolve_model(None).path / "config.json")
    policy = policy_for(device, ablate)
    capacity = max(policy.kv_step, policy.long_context if policy.long_context < 1 << 40 else 0)
    plans = [decode_plan(Builder(config, policy, capacity=capacity))]
    plans += [prefill_plan(Builder(config, policy, rows=policy.buckets[-1], capacity=capacity))]
    return [(d.kernel.name, d.barrier, d.constants, d.params) for plan in plans for d in plan.dispatches]


@pytest.mark.parametrize("device", ["cpu", "metal"])
@pytest.mark.parametrize("name", sorted(set(ABLATIONS) - UNSEEN))
def test_plan_changes_without_the_mechanism(device, name):
    if device == "cpu" and name in NOT_ON_CPU:
        assert kernels_of(device, (name,)) == kernels_of(device, ())
    else:
        assert kernels_of(device, (name,)) != kernels_of(device, ())


def test_all_mechanisms_off_at_once(expected):
    with lily.Engine(max_context=512, ablate=list(ABLATIONS)) as engine:
        found = engine.generate("Once upon a time", max_tokens=24, temperature=0.0, ignore_eos=True).token_ids
    assert found == expected


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(lily.InvalidRequestError, match=r"unknown ablation 'speed'; known: overlap, handoff, .*"):
        policy_for("cpu", ("speed",))
