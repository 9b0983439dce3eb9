# SPDX-License-Identifier: Apache-2.0
"""Every kernel that any request can need, specialised before the first request: no reply waits for a compiler.

The routes are those of the plans themselves (``lily/plan/every.py``), decode at the smallest and the largest KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod

from lily.checkpoint.config import ModelConfig
from lily.device.device import Device
from lily.kernels import Kernel
from lily.plan import Dispatch, every_plan
from lily.plan.weights_map import WeightsMap
from lily.policy import Policy

COMPILERS = 8  # at once; more than macOS runs for one process do no harm

Pipeline = tuple[Kernel, tuple[int, ...], int]  # with the threads of its largest group


def pipelines(config: ModelConfig, policy: Policy, weights: WeightsMap, max_context: int) -> list[Pipeline]:
    """What an engine can need whose context has ``max_context`` tokens at most."""
    reaches = sorted({min(policy.kv_tokens(1), max_context), max_context})
    plans = every_plan(config, policy, kv_tokens=reaches, weights=weights)
    return pipelines_of(d for plan in plans for d in plan.dispatches)


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
