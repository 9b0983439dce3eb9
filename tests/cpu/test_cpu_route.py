# SPDX-License-Identifier: Apache-2.0
"""Routing kernels: which experts a row goes to, with which weights, and the grouping of rows by expert.

Expected values: float64 softmax with a stable sort, and a grouping written with numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import Array, fill, run_call, same_bits
from routing_calls import check_grouping, expected, group_call, random_logits, topk_call

from lily.device.device import Device


def topk(device: Device, *given: Any, **more: Any) -> tuple[Array, Array]:
    out = run_call(device, topk_call(*given, **more))
    return out["ids"], out["weights"]


@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(("experts", "active"), [(256, 8), (1, 1), (2, 1), (3, 3), (8, 2), (17, 5), (64, 8), (255, 16)])
def test_top_experts_and_weights(device: Device, experts: int, active: int, renorm: bool) -> None:
    logits = random_logits(33, experts)
    # The shared expert's gate stands behind the experts' logits and must not take part.
    logits[:, -1] = 100
    ids, weights = topk(device, logits, active, renorm)
    want_ids, want_weights = expected(logits, active, renorm)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-6)


def test_ties_go_to_the_lower_index(device: Device) -> None:
    logits = np.zeros((4, 257), np.float32)
    logits[1, 200:210] = 1
    logits[2, ::2] = -0.0
    logits[3] = np.tile(np.arange(64, dtype=np.float32), 5)[:257]
    ids, weights = topk(device, logits, 8)
    np.testing.assert_array_equal(ids[0], np.arange(8))
    np.testing.assert_array_equal(ids[1], np.arange(200, 208))
    np.testing.assert_array_equal(ids[2], np.arange(8))
    np.testing.assert_array_equal(ids[3], [63, 127, 191, 255, 62, 126, 190, 254])
    np.testing.assert_array_equal(weights[0], np.full(8, 0.125))


def test_distinct_logits_of_equal_probability_keep_their_order(device: Device) -> None:
    logits = np.full((1, 9), -90, np.float32)
    logits[0, :4] = [0, np.nextafter(np.float32(-80), np.float32(0)), -80, np.nextafter(np.float32(-80), np.float32(0))]
    np.testing.assert_array_equal(topk(device, logits, 4)[0], [[0, 1, 3, 2]])


def test_ids_stay_valid_whatever_the_logits(device: Device) -> None:
    logits = random_logits(4, 16)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    ids, weights = topk(device, logits, 8)
    for row in ids:
        assert len(set(row)) == 8
        assert row.min() >= 0
        assert row.max() < 16
    assert np.isnan(weights[0]).all()
    # NaN comes last.
    odd = np.arange(1, 16, 2)
    np.testing.assert_array_equal(ids[1], odd[np.argsort(-logits[1, odd], kind="stable")])


def test_a_row_does_not_depend_on_the_others(device: Device) -> None:
    logits = random_logits(9, 256)
    ids, weights = topk(device, logits, 8)
    for m in range(9):
        one_ids, one_weights = topk(device, logits[m : m + 1], 8)
        assert same_bits(one_ids[0], ids[m])
        assert same_bits(one_weights[0], weights[m])


def test_rows_beyond_the_step_are_left_alone(device: Device) -> None:
    ids, weights = topk(device, random_logits(5, 16), 2, rows=3)
    assert np.isnan(weights[3:]).all()
    assert np.isfinite(weights[:3]).all()
    assert same_bits(ids[3:], fill((2, 2), np.int32))


# ---- grouping -------------------------------------------------------------------------------------------------------


def group(device: Device, *given: Any, **more: Any) -> dict[str, Array]:
    return run_call(device, group_call(*given, **more))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 512])
@pytest.mark.parametrize(("experts", "active", "tile"), [(256, 8, 32), (1, 1, 16), (8, 2, 1), (16, 16, 7)])
def test_rows_are_grouped_by_expert(device: Device, rows: int, experts: int, active: int, tile: int) -> None:
    r = np.random.default_rng(rows)
    ids = np.array([r.permutation(experts)[:active] for _ in range(rows)], np.int32)
    check_grouping(group(device, ids, experts, tile), ids, experts, tile)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 4096])
def test_all_rows_on_one_expert_and_the_others_empty(device: Device, rows: int) -> None:
    ids = np.full((rows, 1), 200, np.int32)
    check_grouping(group(device, ids, 256, 32), ids, 256, 32)


def test_more_than_32767_assignments(device: Device) -> None:
    ids = np.tile(np.arange(8, dtype=np.int32) * 31, (4097, 1))
    check_grouping(group(device, ids, 256, 32), ids, 256, 32)


def test_the_map_of_blocks_is_full_without_sentinels(device: Device) -> None:
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    out = group(device, ids, 8, 1, spare=-8)
    np.testing.assert_array_equal(out["blocks"], [(e, e) for e in range(8)])


def test_rows_beyond_the_step_do_not_count(device: Device) -> None:
    ids = np.full((6, 2), 3, np.int32)
    ids[4:] = 0x7FFFFFFF
    out = group(device, ids, 8, 4, rows=4)
    check_grouping({**out, "order": out["order"][:8]}, ids[:4], 8, 4)
    assert same_bits(out["order"][8:], fill(4, np.int32))


def test_a_map_of_blocks_that_is_too_small_is_not_overrun(device: Device) -> None:
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    np.testing.assert_array_equal(group(device, ids, 8, 1, spare=-11)["blocks"], [(e, e) for e in range(5)])
