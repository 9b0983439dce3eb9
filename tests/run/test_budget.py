# SPDX-License-Identifier: Apache-2.0
"""How much conversations get of a Mac's memory, computed for the 35B model."""

from __future__ import annotations

import pytest
from real_model import WHOLE

from lily.plan.weights_map import map_weights
from lily.policy import POLICIES
from lily.run.budget import SOME_LENGTH, Budget, plan_context, residents_bytes, sequence_bytes, sequences_for

POLICY = POLICIES["metal"]
WEIGHTS = map_weights(WHOLE, POLICY)


@pytest.mark.parametrize(
    ("working_set", "context", "sequences", "conversations"),
    [(22.9065e9, 65_536, 2, 2), (28.991e9, 262_144, 4, 5), (51.539e9, 262_144, 4, 10)],
    ids=["32 GB", "36 GB", "64 GB"],
)
def test_what_a_mac_holds(working_set: float, context: int, sequences: int, conversations: int) -> None:
    """Two conversations of 45,000 tokens fit into 32 GB, each with two kept states beside its slots."""
    budget = Budget(int(working_set), 1 << 62, "")
    tokens, memory = plan_context(WHOLE, POLICY, WEIGHTS, budget=budget)
    assert tokens == context
    pool = residents_bytes(budget, memory, sequence_bytes(WHOLE, POLICY, tokens))
    assert pool <= working_set / 4
    assert pool <= 0.9 * (working_set - memory.weights - memory.scratch)
    assert sequences_for(pool, sequence_bytes(WHOLE, POLICY, SOME_LENGTH)) == sequences
    assert pool // sequence_bytes(WHOLE, POLICY, POLICY.kv_tokens(45_000), points=2) == conversations


def test_a_context_that_was_asked_for_is_given_where_it_fits() -> None:
    budget = Budget(int(22.9065e9), 1 << 62, "")
    tokens, memory = plan_context(WHOLE, POLICY, WEIGHTS, budget=budget, max_context=100_000)
    one = sequence_bytes(WHOLE, POLICY, tokens)
    assert tokens == 100_000
    assert residents_bytes(budget, memory, one) == max(one, (budget.total - memory.weights - memory.scratch) * 9 // 10)


def test_a_small_machine_has_at_least_a_context() -> None:
    """Where next to nothing is left, the context takes it."""
    budget = Budget(WEIGHTS.nbytes + int(1.3e9), 1 << 62, "")
    tokens, memory = plan_context(WHOLE, POLICY, WEIGHTS, budget=budget)
    assert 0 < tokens < 65_536
    assert memory.total <= budget.total
