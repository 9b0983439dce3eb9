# SPDX-License-Identifier: Apache-2.0
"""Metal decode kernels around quantised matrices and rows, emulated, against float64 on the dequantised weights.

gemv.metal, moe_decode.metal, elementwise.metal.  Outputs in bf16 are compared as such: half a unit of its last place,
plus what a different order of float32 sums can do.  Not handled: GDN and attention (their own files), whole plans.
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_harness import ORDERS, bf16, needs_shaders
from shader_decode import (
    GEMVS,
    Moe,
    Row,
    check_copy,
    check_embedding,
    check_last_row,
    check_rmsnorm,
    check_single_matrices,
    check_swiglu,
)

from lily.policy import policy_for

pytestmark = needs_shaders


# ---- projections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
def test_gemv_multiplies_every_quantisation(bits: int, group: int) -> None:
    for k in (group, 3 * group, 640, 1152):  # less than a lane's share, tails, several rounds
        Row(19, k, bits, group).check("gemv")


@pytest.mark.parametrize("kernel", GEMVS)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])
def test_rows_beyond_the_last_are_left_alone(kernel: str, n: int) -> None:
    Row(n, 192, 4, 64).check(kernel, blocks=2)


@pytest.mark.parametrize("kernel", GEMVS)
def test_production_width(kernel: str) -> None:
    Row(24, 2048, 4, 64).check(kernel, blocks=1)


@pytest.mark.parametrize("kernel", GEMVS)
def test_eight_bits(kernel: str) -> None:
    Row(9, 512, 8, 64).check(kernel)


@pytest.mark.parametrize("kernel", GEMVS)
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 64), (1, 128), (2, 64), (2, 128), (4, 128), (1, 256)])
def test_simdgroups_take_rows_or_share_columns(kernel: str, blocks: int, threads: int) -> None:
    Row(35, 1088, 4, 64).check(kernel, blocks=blocks, threads=threads)


@pytest.mark.parametrize("kernel", GEMVS)
@pytest.mark.parametrize("order", ORDERS)
def test_checked_in_every_lane_order(kernel: str, order: str) -> None:
    for blocks, threads in ((1, 64), (2, 128)):
        Row(13, 576, 4, 64).check(kernel, blocks=blocks, threads=threads, order=order, checked=True)


@pytest.mark.parametrize("kernel", GEMVS)
def test_float_activations(kernel: str) -> None:
    Row(11, 320, 4, 64, act="f32").check(kernel)


def test_small_and_large_norms_do_not_lose_accuracy() -> None:
    for scale in (1e-6, 1e-3, 1e4):
        row = Row(8, 256, 4, 64)
        row.x = bf16(row.x.astype(np.float32) * scale)
        row.check("gemv_norm_f32")


@pytest.mark.parametrize("kernel", GEMVS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_every_weight_byte_is_read_once(kernel: str, blocks: int) -> None:
    """Distinct bytes are exactly weights and inputs; weights are not read again, whatever the group's shape."""
    row = Row(32, 512, 4, 64)
    out = row.run(kernel, blocks=blocks, checked=True)
    weights = (32 * 512 // 2 + 2 * 32 * 8 * 2) * (2 if "swiglu" in kernel else 1)
    inputs = 512 * 2 * (2 if "gated" in kernel else 1) + 512 * 4 * ("norm" in kernel)
    residual = 32 * 2 * ("residual" in kernel)
    small = 4 * 4  # parameters
    assert weights + inputs + residual <= out.distinct_read <= weights + inputs + residual + small
    assert out.distinct_written == 32 * (4 if kernel == "gemv_norm_f32" else 2)


@pytest.mark.parametrize("pair", [False, True])
def test_policy_gives_simdgroups_whole_shares(pair: bool) -> None:
    """What team_of in gemv.h assumes, for every size; where rows are few, simdgroups share columns that there are."""
    policy, outputs = policy_for("metal"), 4 if pair else 8
    for n in (1, 8, 257, 512, 2048, 9216, 12_352, 248_320):
        for k in (32, 512, 2048, 4096):
            per_group, threads = policy.gemv_shape(n, k, pair=pair)
            blocks, parts = per_group // outputs, threads // 32 * outputs // per_group
            assert per_group == blocks * outputs
            assert threads == 32 * blocks * parts <= 256
            assert parts == 1 or 512 * (parts // 2) < k
    for active in range(1, 33):
        per_group, threads = policy.moe_down_shape(active)
        assert per_group == 8
        assert 32 <= threads <= 128
    assert policy.moe_down_shape(8) == (8, 96)  # three simdgroups with three experts each


# ---- mixture of experts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_gate_up(bits: int) -> None:
    Moe(bits).check_gate_up()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("per_group", "threads"), [(8, 32), (8, 64), (8, 96), (16, 64), (16, 128)])
def test_experts_down_with_any_share_of_experts(bits: int, per_group: int, threads: int) -> None:
    Moe(bits).check_down(per_group=per_group, threads=threads)


def test_experts_of_production_width() -> None:
    Moe(experts=9, active=8, h=2048, n=12, k=64, group=64).check_gate_up()


@pytest.mark.parametrize("threads", [32, 96])
def test_down_of_production_width(threads: int) -> None:
    Moe(experts=9, active=8, h=64, k=512, group=64, ks=512).check_down(threads=threads)


@pytest.mark.parametrize("n", [1, 4, 5, 9])
def test_expert_rows_beyond_the_last_are_left_alone(n: int) -> None:
    Moe(n=n).check_gate_up(per_group=16, threads=128)
    Moe(h=32 * n, n=4).check_down(per_group=16, threads=128)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_checked_in_every_lane_order(order: str) -> None:
    moe = Moe(experts=40, active=8)
    for threads in (64, 128):
        moe.check_gate_up(threads=threads, order=order, checked=True)
    for threads in (32, 96):
        moe.check_down(threads=threads, order=order, checked=True)


@pytest.mark.parametrize("experts", [8, 31, 32, 33, 255, 256])
def test_choice_among_any_number_of_experts(experts: int) -> None:
    moe = Moe(experts=experts, active=8, h=32, n=4)
    moe.check_gate_up()
    moe.logits[:] = np.arange(experts + 1)
    moe.check_gate_up()
    moe.logits[:] = -np.arange(experts + 1)
    moe.check_gate_up(renorm=0)


def test_ties_go_to_the_lower_expert_and_nan_comes_last() -> None:
    moe = Moe(experts=20, active=5, h=32, n=4)
    for logits in ([1.0] * 21, [0.0, -0.0] * 10 + [0], [2, 1] * 10 + [0], [-np.inf] * 18 + [3, 3, 0]):
        moe.logits[:] = logits
        np.testing.assert_array_equal(moe.gate_up()["ids"], moe.chosen())
    moe.logits[:] = np.nan
    np.testing.assert_array_equal(moe.gate_up()["ids"], np.arange(5))
    moe.logits[3:7] = (-np.inf, 0, -1e30, 1e30)
    np.testing.assert_array_equal(moe.gate_up()["ids"], [6, 4, 5, 3, 0])


def test_only_chosen_experts_are_read() -> None:
    moe = Moe(experts=16, active=2, h=512, n=32, k=64, group=64)
    out = moe.gate_up(checked=True)
    weights = 2 * 2 * (32 * 512 // 2 + 2 * 32 * 8 * 2)
    rest = 512 * 2 + 512 * 4 + 16 * 4 + 7 * 4
    assert weights <= out.distinct_read <= weights + rest
    moe = Moe(experts=16, active=2, h=512, k=64, group=64)
    out = moe.run_down(np.array([3, 11], np.int32), np.ones(2, np.float32), checked=True)
    weights = 2 * (512 * 64 // 2 + 2 * 512 * 2) + 512 * 64 + 2 * 512 * 2
    rest = 2 * 64 * 2 + 64 * 2 + 512 * 2 + 2 * 4 + 2 * 4 + 4 + 6 * 4
    assert weights <= out.distinct_read <= weights + rest


@pytest.mark.parametrize("checked", [False, True])
def test_single_matrices_of_experts(checked: bool) -> None:
    check_single_matrices(checked)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 33, 512])
def test_swiglu_over_its_whole_range(n: int, order: str) -> None:
    check_swiglu(n, order)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
@pytest.mark.parametrize("order", ORDERS)
def test_embedding_gathers_rows(bits: int, group: int, order: str) -> None:
    check_embedding(bits, group, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [4, 64, 100, 512, 2048])
def test_rmsnorm_follows_the_formula(width: int, order: str) -> None:
    check_rmsnorm(width, order)


def test_last_row_is_the_last_of_the_step() -> None:
    check_last_row()


@pytest.mark.parametrize("size", [16, 65_520, 65_536, 65_552, 200_000])
def test_copy_copies_every_byte(size: int) -> None:
    check_copy(size)
