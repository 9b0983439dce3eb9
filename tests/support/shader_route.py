# SPDX-License-Identifier: Apache-2.0
"""Runs the routing shaders, and holds them to the references of routing_calls.py.

test_shaders_route.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msl_harness import SLACK, Array, run_many
from routing_calls import check_grouping, expected, group_call, random_logits, topk_call


def topk(*given: Any, rows: int | None = None, **options: Any) -> tuple[Array, Array]:
    out = run_many([topk_call(*given, rows=rows)], **options)[0]
    return out["ids"], out["weights"]


def check_topk(experts: int, active: int, renorm: bool, order: str) -> None:
    logits = random_logits(9, experts)
    logits[:, -1] = 100  # the shared expert's gate stands behind the experts' logits and must not take part
    ids, weights = topk(logits, active, renorm, order=order)
    want_ids, want_weights = expected(logits, active, renorm)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6 * SLACK)


def group(*given: Any, order: str = "forward", checked: bool = False, **more: Any) -> dict[str, Array]:
    return run_many([group_call(*given, **more)], order=order, checked=checked)[0].arrays


def random_ids(rows: int, experts: int, active: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, experts)), -1)[:, :active].astype(np.int32)


def check_grouped(rows: int, experts: int, active: int, tile: int) -> None:
    ids = random_ids(rows, experts, active)
    check_grouping(group(ids, experts, tile), ids, experts, tile)
