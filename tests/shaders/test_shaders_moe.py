# SPDX-License-Identifier: Apache-2.0
"""Expert shaders of prefill against float64: grouped products over a block map, combine, and expansion to memory.

Not handled: routing by itself (test_shaders_route.py), dense products (test_shaders_gemm.py), decode
(test_shaders_moe_decode.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_harness import ORDERS, bf16, needs_emulator, needs_shaders, run_many
from shader_gemm import BF16, METAL, TILES, close, weights_of
from shader_moe import (
    Experts,
    check_combine,
    check_expanded_products,
    check_expansion,
    check_uneven,
    combine,
    expanded,
    uneven_ids,
)

pytestmark = needs_shaders


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_one_expert_gets_all_rows(rows: int, tile: int) -> None:
    moe = Experts(np.full((rows, 1), 2, np.int32), 4, k=64, n=40, seed=rows)
    close(moe.gate_up(tile)["y"], moe.expected_gate_up(), BF16)
    close(moe.down_only(tile)["y"], moe.expected_down(), BF16)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("experts", "active"), [(1, 1), (7, 3), (16, 8)])
def test_uneven_and_empty_experts(experts: int, active: int, tile: int, bits: int, metal: int) -> None:
    check_uneven(experts, active, tile, bits, metal)


def test_256_experts_with_few_rows_each() -> None:
    moe = Experts(uneven_ids(12, 256, 8), 256, k=32, n=8)
    close(moe.gate_up(16)["y"], moe.expected_gate_up(), BF16)
    close(moe.down_only(16)["y"], moe.expected_down(), BF16)


@pytest.mark.parametrize("outputs", [1, 7, 8, 31, 32, 33, 63, 64, 65])
def test_experts_at_the_edges_of_outputs(outputs: int) -> None:
    moe = Experts(uneven_ids(9, 5, 2), 5, k=96, n=outputs)
    for tile in TILES:
        close(moe.gate_up(tile)["y"], moe.expected_gate_up(), BF16)
        close(moe.down_only(tile)["y"], moe.expected_down(), BF16)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_do_not_depend_on_the_order_of_threads(order: str) -> None:
    moe = Experts(uneven_ids(40, 5, 2), 5, k=64, n=40)
    for tile in TILES:
        close(moe.gate_up(tile, order=order)["y"], moe.expected_gate_up(), BF16)
        close(moe.down_only(tile, order=order)["y"], moe.expected_down(), BF16)


def test_4096_rows_of_8_experts() -> None:
    """32,768 assignments: one more than 16 bits with a sign can count."""
    ids = np.tile(np.arange(8, dtype=np.int32), (4096, 1))
    moe = Experts(ids, 8, k=32, n=8)
    got = moe.down_only(64)["y"]
    close(got[-64:], moe.expected_down()[-64:], BF16)
    assert np.isfinite(got.astype(float)).all()


@needs_emulator
@pytest.mark.parametrize(("bits", "metal"), [(8, 320), (4, 400)])
@pytest.mark.parametrize("tile", TILES)
def test_experts_run_clean_when_checked(tile: int, bits: int, metal: int) -> None:
    moe = Experts(uneven_ids(11, 5, 3), 5, k=96, n=34, bits=bits)
    moe.gate_up(tile, checked=True, order="random", metal=metal)
    moe.down_only(tile, checked=True, metal=metal)


# ---- combine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "hidden", "experts", "active"), [(1, 32, 4, 2), (3, 256, 8, 8), (5, 288, 256, 1)])
def test_results_are_weighted_and_added(rows: int, hidden: int, experts: int, active: int) -> None:
    check_combine(rows, hidden, experts, active)


@pytest.mark.parametrize("order", ORDERS)
def test_combine_runs_clean_when_checked(order: str) -> None:
    close(*combine(2, 288, 8, 3, checked=True, order=order), BF16)


# ---- expansion to memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "k", "group"), [(4, 96, 32), (8, 64, 64), (4, 1152, 128)])
def test_matrices_are_expanded_to_bf16(bits: int, k: int, group: int) -> None:
    check_expansion(bits, k, group)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("tile", TILES)
def test_products_of_expanded_matrices(tile: int, metal: int) -> None:
    check_expanded_products(tile, metal)


@needs_emulator
def test_expanded_products_run_clean_when_checked() -> None:
    moe = Experts(uneven_ids(9, 4, 2), 4, k=64, n=20)
    w = bf16(np.stack([weights_of(d) for d in moe.down]))
    for gather in (0, 1):
        x = moe.x if gather else moe.sorted_x
        call = moe.call("moe_gemm_expanded", 16, x, w, 1, gather=gather, first=0, stride=20)
        run_many([call], checked=True)


@pytest.mark.parametrize("tile", TILES)
def test_one_part_of_a_stack_is_multiplied(tile: int) -> None:
    """Gate and up, with rows of padding between and behind them that hold NaN."""
    moe = Experts(uneven_ids(17, 5, 2), 5, k=64, n=33)
    w = bf16(np.full((5, 80, 64), np.nan))
    for e in range(5):
        w[e, :33], w[e, 40:73] = bf16(weights_of(moe.gate[e])), bf16(weights_of(moe.up[e]))
    ids = moe.ids.reshape(-1)
    for first, parts in ((0, moe.gate), (40, moe.up)):
        call = moe.call("moe_gemm_expanded", tile, moe.x, w, 1, gather=1, first=first, stride=80)
        order = np.argsort(ids, kind="stable")
        want = [weights_of(parts[ids[a]]) @ moe.x[a // 2].astype(float) for a in order]
        close(run_many([call], checked=True)[0]["y"], np.array(want), BF16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", TILES)
def test_expansion_and_product_have_the_bits_of_the_fused_kernel(tile: int, bits: int) -> None:
    moe = Experts(uneven_ids(40, 5, 2), 5, k=96, n=40, bits=bits)
    call = moe.call("moe_gemm_expanded", tile, moe.sorted_x, expanded(moe.down), 1, gather=0, first=0, stride=40)
    assert run_many([call])[0]["y"].tobytes() == moe.down_only(tile)["y"].tobytes()
