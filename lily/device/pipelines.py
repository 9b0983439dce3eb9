# SPDX-License-Identifier: Apache-2.0
"""Every kernel that any request can need, specialised before the first request: no reply waits for a compiler.

The routes are those of the plans themselves: each prompt bucket, scoring, decode at the smallest and the largest KV
cache, each way of sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

from lily.checkpoint.config import ModelConfig
from lily.device.device import Device
from lily.kernels import Kernel
from lily.plan import Builder, Dispatch, Plan, decode_plan, prefill_plan, sample_plan
from lily.plan.weights_map import WeightsMap
from lily.policy import Policy

COMPILERS = 8  # at once; more than macOS runs for one process do no harm

Pipeline = tuple[Kernel, tuple[int, ...], int]  # with the threads of its largest group


def all_plans(config: ModelConfig, policy: Policy, weights: WeightsMap, max_context: int) -> Iterator[Plan]:
    """One plan of each kind that an engine with ``max_context`` tokens of room can record."""

    def builder(rows: int, capacity: int) -> Builder:
        return Builder(config, policy, rows=rows, capacity=capacity, weights=weights)

    for capacity in sorted({min(policy.kv_capacity(1), max_context), max_context}):
        yield decode_plan(builder(1, capacity))
    for rows in policy.buckets:
        yield prefill_plan(builder(rows, max_context))
        yield prefill_plan(builder(rows, max_context), score_top=1)
    for greedy, logprobs in ((True, False), (False, False), (False, True)):
        yield sample_plan(builder(1, max_context), greedy=greedy, logprobs=logprobs)


def pipelines(config: ModelConfig, policy: Policy, weights: WeightsMap, max_context: int) -> list[Pipeline]:
    """What these plans need."""
    return pipelines_of(d for plan in all_plans(config, policy, weights, max_context) for d in plan.dispatches)


def pipelines_of(dispatches: Iterable[Dispatch]) -> list[Pipeline]:
    """The kernels with their constants that ``dispatches`` need, each once."""
    threads: dict[tuple[Kernel, tuple[int, ...]], int] = {}
    for d in dispatches:
        key = (d.kernel, d.constants)
        threads[key] = max(threads.get(key, 0), prod(d.threads))
    return [(*key, largest) for key, largest in threads.items()]


def compile_pipelines(device: Device, wanted: Iterable[Pipeline]) -> None:
    """Asks the device for all of them, several at a time; DeviceError for the first that it cannot make."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda pipeline: device.kernel(*pipeline), wanted))
