# SPDX-License-Identifier: Apache-2.0
"""How long a context fits: weights, state, scratch and snapshots first, the KV cache into what is left."""

from __future__ import annotations

from lily.config import ModelConfig
from lily.errors import DeviceError, InvalidRequestError
from lily.plan import Builder, decode_plan, prefill_plan
from lily.plan.memory import MemorySum, memory_sum
from lily.plan.weights_map import WeightsMap
from lily.policy import Policy

SNAPSHOTS = 4


def plan_context(
    config: ModelConfig, policy: Policy, weights: WeightsMap, *, room: int, max_context: int | None = None,
    name: str = "the model",
) -> tuple[int, MemorySum]:  # fmt: skip
    """(tokens of the context, memory it needs) when ``room`` bytes are there; ``max_context`` asks for so many.

    Raises InvalidRequestError beyond the model's limit, and DeviceError with the sum if it cannot fit.
    """
    scratch = largest_scratch(config, policy, weights, max_context or config.max_position_embeddings)

    def needed(tokens: int) -> MemorySum:
        return memory_sum(config, policy, weights, capacity=tokens, scratch=scratch, snapshots=SNAPSHOTS)

    limit = config.max_position_embeddings
    if max_context is not None and not 2 <= max_context <= limit:
        raise InvalidRequestError(f"max_context is {max_context}; allowed are 2 to {limit} for this model")
    fixed, per_token = needed(0), needed(1).kv_per_token
    fits = (room - fixed.total) // per_token if per_token else limit
    if fits < (max_context or 1):
        want = needed(max_context or 1)
        raise DeviceError(
            f"{name} does not fit: it needs {_gb(want.total)} (weights {_gb(want.weights)}, state {_gb(want.state)}, "
            f"KV cache {_gb(want.kv)}, scratch {_gb(want.scratch)}, snapshots {_gb(want.snapshots)}), {_gb(room)} are "
            "available; "
            + ("use a smaller max_context" if fits >= 1 else "close other programs or use a smaller model")
        )
    tokens = max_context or min(limit, fits)
    return tokens, needed(tokens)


def largest_scratch(config: ModelConfig, policy: Policy, weights: WeightsMap, capacity: int) -> int:
    """Scratch bytes of the plan that needs most: a full chunk, the scoring of one, or decode at full capacity."""

    def builder(rows: int) -> Builder:
        return Builder(config, policy, rows=rows, capacity=capacity, weights=weights)

    rows = policy.buckets[-1]
    plans = decode_plan(builder(1)), prefill_plan(builder(rows)), prefill_plan(builder(rows), score_top=0)
    return max(plan.scratch_bytes for plan in plans)


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB"
