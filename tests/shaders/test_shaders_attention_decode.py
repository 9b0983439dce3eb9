# SPDX-License-Identifier: Apache-2.0
"""Metal kernels of decode attention, emulated, against the float64 formulas of test_cpu_attention.

Not handled: the output gate of decode, which belongs to the projection that follows (test_shaders_decode.py).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from attention import EPS, Shape, attend, prepared
from kernel_harness import from_bf16
from msl_harness import ORDERS, SLACK, Run, bf16, needs_shaders, run, same_result, step
from shader_attention_decode import REAL, Array, check_combine, check_decode, check_prepared, decode, layer_of, merged

pytestmark = needs_shaders
NARROW = Shape(2, 1, 64, 16)
# Every head size; 8, 3, 1, 5 and 12 query heads a KV head; one rotary pair, all of them, an odd number.
SHAPES = [REAL, Shape(6, 2, 64, 64), Shape(2, 2, 128, 128), Shape(5, 1, 64, 10), Shape(24, 2, 64, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_follows_the_formulas(shape: Shape) -> None:
    for position in (0, 1, 2, 15, 64, 255, 256, 257):
        check_decode(layer_of(shape, position, seed=position))


@pytest.mark.parametrize("pack", [1, 2, 4, 8])
def test_any_number_of_heads_shares_a_load(pack: int) -> None:
    check_decode(layer_of(REAL, 37), pack=pack)
    check_decode(layer_of(Shape(24, 2, 64, 16), 37), pack=pack)  # 12 heads: packs that do not come out even


@pytest.mark.parametrize("threads", [32, 64, 128, 256])
def test_any_number_of_simdgroups(threads: int) -> None:
    check_decode(layer_of(Shape(8, 1, 64, 16), 301), threads=threads)
    check_decode(layer_of(Shape(8, 1, 256, 64), 70), threads=threads)


@pytest.mark.parametrize("position", [4094, 4095, 4096])
def test_longer_contexts(position: int) -> None:
    check_decode(layer_of(NARROW, position), pack=2)


@pytest.mark.parametrize("position", [32_766, 32_767, 32_768])
def test_contexts_around_32768(position: int) -> None:
    check_decode(layer_of(Shape(1, 1, 64, 16), position), split=512, threads=128, pack=1, fixed=1)


@pytest.mark.parametrize("position", [1022, 1023, 1024, 1025, 1279, 2500])
def test_fixed_blocks_equal_the_general_layout(position: int) -> None:
    shape = Shape(8, 1, 256, 64)
    layer = layer_of(shape, position)
    fixed = check_decode(layer, split=1024, fixed=1)
    general = decode(layer, split=1024, fixed=0)
    for name in ("part_o", "part_ml", "k", "v"):
        assert same_result(fixed[name], general[name])


@pytest.mark.parametrize("split", [64, 100, 256, 512])
def test_splits_of_any_length(split: int) -> None:
    check_decode(layer_of(NARROW, 530), split=split, pack=2)


def test_partials_are_those_of_their_split() -> None:
    layer = layer_of(NARROW, 300)
    out = decode(layer, split=128, pack=2)
    q, _, _ = prepared(layer)
    k, v = (from_bf16(out[n].view(np.uint16)).astype(np.float64)[:, 0] for n in "kv")
    for i in range(3):
        at = slice(128 * i, min(128 * (i + 1), 301))
        s = q[0] @ k[at].T / 8
        top = s.max(-1)
        e = np.exp(s - top[:, None])
        np.testing.assert_allclose(out["part_ml"][i, :, 0], top, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out["part_ml"][i, :, 1], e.sum(-1), rtol=1e-5)
        np.testing.assert_allclose(out["part_o"][i], e @ v[at], rtol=1e-4, atol=1e-4)


def test_rope_is_exact_at_the_last_position() -> None:
    """Pair 0 turns by 262,143 radians: an argument reduction in float32 would be off by 1e-2."""
    shape = Shape(1, 1, 64, 64)
    position, split = 262_143, 64
    layer = layer_of(shape, position)
    splits = position // split + 1
    args = {
        "step": step(position), "proj": bf16(layer.proj[0]), "q_norm": layer.q_norm, "k_norm": layer.k_norm,
        "inv_freq": layer.inv_freq, "k": layer.k.view(ml_dtypes.bfloat16), "v": layer.v.view(ml_dtypes.bfloat16),
        "part_o": np.zeros((splits, 1, 64), np.float32), "part_ml": np.zeros((splits, 1, 2), np.float32),
    }  # fmt: skip
    layer.k[position - 63 : position], layer.v[position - 63 : position] = 0, 0
    out = run_last_split(args, shape, split, splits)
    q, k, _ = prepared(layer)
    np.testing.assert_allclose(
        out["k"][position].astype(np.float64), k[0], rtol=2.0**-8 + 1e-6 * SLACK, atol=2e-6 * SLACK
    )
    own = from_bf16(out["k"].view(np.uint16)[position, 0]).astype(np.float64)
    score = q[0, 0] @ own / 8
    np.testing.assert_allclose(out["part_ml"][-1, 0, 0], max(score, 0), rtol=1e-5)


def run_last_split(args: dict[str, Array], shape: Shape, split: int, splits: int) -> Run:
    constants = {**shape.heads, "rot": shape.rot, "pack": 1, "fixed": 0}
    params = {"pitch": shape.pitch, "eps": EPS, "split": split}
    return run("attn_decode", args, params, constants, grid=(splits, 1), threads=(32,))


def test_great_scores_do_not_overflow() -> None:
    layer = layer_of(NARROW, 200)
    layer.q_norm *= 300
    layer.k[:200] = bf16(from_bf16(layer.k[:200]) * 10).view(np.uint16)
    out = decode(layer, pack=2)
    q, _, _ = prepared(layer)
    want = attend(q, out["k"].view(np.uint16), out["v"].view(np.uint16), 200)[0]
    # Scores of thousands carry a rounding error of about 1e-3, which the exponential passes on.
    np.testing.assert_allclose(merged(out["part_o"], out["part_ml"], 1), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("order", ORDERS)
def test_checked_in_every_lane_order(order: str) -> None:
    check_decode(layer_of(Shape(8, 1, 256, 64), 20), order=order, checked=True)
    check_decode(layer_of(Shape(10, 2, 64, 16), 70), split=32, threads=128, order=order, checked=True)
    check_decode(layer_of(Shape(8, 1, 256, 64), 260), split=512, fixed=1, order=order, checked=True)
    check_decode(layer_of(Shape(10, 2, 64, 16), 64), split=32, threads=128, order=order, checked=True)  # a new split


def test_cache_rows_are_read_once() -> None:
    layer = layer_of(Shape(8, 1, 256, 64), 99)
    out = decode(layer, checked=True)
    s, rows = layer.shape, 2 * 100 * 256 * 2
    rest = 2 * (s.pitch - s.hq * s.dim) + 4 * (2 * s.dim + s.rot // 2) + 16
    assert rows - 2 * 256 * 2 <= out.distinct_read <= rows + rest
    assert out.distinct_written == 2 * 256 * 2 + s.hq * s.dim * 4 + s.hq * 8


@pytest.mark.parametrize("coalesced", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_prepared_decode_follows_the_formulas(coalesced: int, order: str) -> None:
    check_prepared(coalesced, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dim", "threads"), [(64, 64), (64, 1024), (128, 64), (256, 256), (256, 1024)])
def test_combine_follows_the_formula(dim: int, threads: int, order: str) -> None:
    check_combine(dim, threads, order)
