# SPDX-License-Identifier: Apache-2.0
"""Every kind of plan that requests need: what a device compiles, what scratch is sized by, what checks walk over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lily.checkpoint.config import ModelConfig
from lily.plan.builder import Builder
from lily.plan.decode import decode_plan
from lily.plan.prefill import prefill_plan
from lily.plan.sample import sample_plan
from lily.plan.views import Plan
from lily.plan.weights_map import WeightsMap, map_weights
from lily.policy import Policy


def every_plan(
    config: ModelConfig, policy: Policy, *, kv_tokens: Sequence[int], rows: Iterable[int] | None = None,
    context: int | None = None, score_top: int = 1, weights: WeightsMap | None = None,
) -> Iterator[Plan]:  # fmt: skip
    """Decodes at each of ``kv_tokens``; at the last of them prefill and score for each of ``rows``, then sampling.

    ``rows``: by default the policy's buckets.  ``context``, ``score_top``: as Builder and prefill_plan have them.
    """
    weights = weights or map_weights(config, policy)

    def builder(reserved: int, count: int = 1) -> Builder:
        return Builder(config, policy, rows=count, kv_tokens=reserved, context=context, weights=weights)

    for reserved in kv_tokens:
        yield decode_plan(builder(reserved))
    for count in policy.buckets if rows is None else rows:
        yield prefill_plan(builder(kv_tokens[-1], count))
        yield prefill_plan(builder(kv_tokens[-1], count), score_top=score_top)
    for greedy, logprobs in ((True, False), (False, False), (False, True)):
        yield sample_plan(builder(kv_tokens[-1]), greedy=greedy, logprobs=logprobs)
