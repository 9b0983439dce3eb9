# SPDX-License-Identifier: Apache-2.0
"""Routing shaders: which experts a row goes to, with which weights, and the grouping of rows by expert.

Expected values: float64 softmax with a stable sort, and a grouping written with numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_harness import ORDERS, SLACK, needs_emulator, needs_shaders
from routing_calls import check_grouping, random_logits
from shader_route import check_grouped, check_topk, group, random_ids, topk

pytestmark = needs_shaders


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(("experts", "active"), [(256, 8), (1, 1), (2, 1), (3, 3), (8, 2), (17, 5), (64, 8), (255, 16)])
def test_top_experts_and_weights(experts: int, active: int, renorm: bool, order: str) -> None:
    check_topk(experts, active, renorm, order)


def test_ties_go_to_the_lower_index() -> None:
    logits = np.zeros((4, 257), np.float32)
    logits[1, 200:210] = 1
    logits[2, ::2] = -0.0
    logits[3] = np.tile(np.arange(64, dtype=np.float32), 5)[:257]
    ids, weights = topk(logits, 8)
    np.testing.assert_array_equal(ids[0], np.arange(8))
    np.testing.assert_array_equal(ids[1], np.arange(200, 208))
    np.testing.assert_array_equal(ids[2], np.arange(8))
    np.testing.assert_array_equal(ids[3], [63, 127, 191, 255, 62, 126, 190, 254])
    np.testing.assert_allclose(weights[0], np.full(8, 0.125), rtol=1e-7 * SLACK)


def test_distinct_logits_of_equal_probability_keep_their_order() -> None:
    logits = np.full((1, 9), -90, np.float32)
    logits[0, :4] = [0, np.nextafter(np.float32(-80), np.float32(0)), -80, np.nextafter(np.float32(-80), np.float32(0))]
    np.testing.assert_array_equal(topk(logits, 4)[0], [[0, 1, 3, 2]])


def test_ids_stay_valid_whatever_the_logits() -> None:
    logits = random_logits(4, 16)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    ids, weights = topk(logits, 8)
    for row in ids:
        assert len(set(row)) == 8
        assert row.min() >= 0
        assert row.max() < 16
    assert np.isnan(weights[0]).all()


def test_rows_beyond_the_step_are_left_alone() -> None:
    ids, weights = topk(random_logits(5, 16), 2, rows=3)
    assert np.isnan(weights[3:]).all()
    assert np.isfinite(weights[:3]).all()
    assert (ids[3:] == -1).all()


@needs_emulator
def test_top_experts_run_clean_when_checked() -> None:
    out, _ = topk(random_logits(3, 200), 8, False, checked=True, order="random")
    assert out.shape == (3, 8)


# ---- grouping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 65])
@pytest.mark.parametrize(
    ("experts", "active", "tile"), [(256, 8, 32), (1, 1, 16), (8, 2, 16), (16, 16, 64), (33, 3, 16)]
)
def test_rows_are_grouped_by_expert(rows: int, experts: int, active: int, tile: int) -> None:
    check_grouped(rows, experts, active, tile)


@pytest.mark.parametrize("order", ORDERS)
def test_grouping_does_not_depend_on_the_order_of_threads(order: str) -> None:
    ids = random_ids(512, 64, 8)
    check_grouping(group(ids, 64, 32, order=order), ids, 64, 32)


@pytest.mark.parametrize("expert", [0, 100, 255])
def test_all_rows_on_one_expert(expert: int) -> None:
    ids = np.full((300, 1), expert, np.int32)
    check_grouping(group(ids, 256, 16), ids, 256, 16)


def test_4096_rows_of_8_experts_pass_the_range_of_16_bits() -> None:
    ids = random_ids(4096, 256, 8)
    check_grouping(group(ids, 256, 64), ids, 256, 64)
    few = random_ids(4096, 9, 8)
    check_grouping(group(few, 9, 64), few, 9, 64)


def test_grouping_looks_at_real_rows_only() -> None:
    ids = random_ids(20, 16, 4)
    ids[11:] = 1 << 20
    out = group(ids, 16, 16, rows=11)
    check_grouping(out, ids[:11], 16, 16)
    assert (out["order"][44:] == -1).all()


def test_small_threadgroups_group_too() -> None:
    ids = random_ids(100, 256, 8)
    check_grouping(group(ids, 256, 32, threads=128), ids, 256, 32)


def test_grouping_runs_clean_when_checked() -> None:
    ids = random_ids(70, 256, 8)
    check_grouping(group(ids, 256, 16, checked=True, order="random"), ids, 256, 16)
