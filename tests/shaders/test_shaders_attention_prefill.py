# SPDX-License-Identifier: Apache-2.0
"""Prefill attention shaders against float64: norm, RoPE, append, and causal attention over cache and chunk.

Not handled: decode attention (test_shaders_attention.py), production-size contexts (their block edges are the same at
every multiple of PREFILL_KEYS).
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_harness import ORDERS, SLACK, bf16, needs_emulator, needs_shaders
from shader_attention_prefill import Attention, check_preparation, prepare
from shader_gemm import float_operands

pytestmark = needs_shaders


# ---- preparation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hq", "hkv", "dim", "rot", "position"),
    [(4, 2, 64, 16, 0), (3, 1, 128, 128, 1000), (8, 1, 256, 64, 262_140), (2, 2, 32, 2, 77)],
)
def test_queries_and_keys_are_normed_and_turned_and_appended(
    hq: int, hkv: int, dim: int, rot: int, position: int
) -> None:
    check_preparation(hq, hkv, dim, rot, position)


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_preparation_runs_clean_when_checked(order: str) -> None:
    proj = bf16(np.random.default_rng(0).normal(size=(4, 2 * 3 * 64 + 2 * 64)))
    out, _ = prepare(proj, 3, 1, 64, 16, 5, 3, 9, threads=96, checked=True, order=order)
    assert np.isfinite(out["q"][:3].astype(float)).all()


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_causal_attention_of_every_head_size(dim: int, act: str) -> None:
    Attention(4, 2, dim, 37, 19).check(act)


@pytest.mark.parametrize("metal", [320, 400])
@pytest.mark.parametrize(("position", "rows"), [(0, 1), (0, 65), (62, 2), (63, 1), (64, 3), (40, 64), (30, 70)])
def test_head_size_256_on_both_matrix_paths(position: int, rows: int, metal: int) -> None:
    Attention(2, 1, 256, position, rows, spare=0, seed=position).check(metal=metal)


def test_tensor_tiles_are_shared_among_any_number_of_groups() -> None:
    case = Attention(4, 2, 256, 5, 70)
    for tile in (4, 128):
        assert np.abs(case.run(tile=tile, metal=400, order="random")[:70] - case.exact()).max() < 1.2e-2


@pytest.mark.parametrize("position", [0, 1, 7, 8, 9, 62, 63, 64, 65, 126, 127, 128])
def test_contexts_at_the_edges_of_blocks(position: int) -> None:
    Attention(2, 1, 64, position, 2, spare=0, seed=position).check()


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_chunks_at_the_edges_of_tiles(rows: int) -> None:
    Attention(1, 1, 32, 3, rows, seed=rows).check()


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 1), (8, 1), (16, 2), (10, 2), (32, 1)])
def test_query_heads_share_their_kv_head(hq: int, hkv: int) -> None:
    Attention(hq, hkv, 32, 20, 9, seed=hq).check()
    Attention(hq, hkv, 32, 20, 3, seed=hq).check("f32")


def test_a_tile_may_hold_more_rows_than_fit_at_once() -> None:
    case = Attention(8, 1, 32, 11, 21)
    got = case.run(tile=16)
    assert np.abs(got[:21] - case.exact()).max() < 1.2e-2


@pytest.mark.parametrize("order", ORDERS)
def test_attention_does_not_depend_on_the_order_of_threads(order: str) -> None:
    Attention(8, 1, 256, 70, 5).check(order=order, seed=9)


def test_a_long_context_in_reduced_form() -> None:
    Attention(1, 1, 8, 4094, 3).check("f32")


def test_context_of_32768_in_reduced_form() -> None:
    Attention(1, 1, 8, 32_766, 3).check("f32")


def test_float_operands() -> None:
    """What a GPU without bfloat arithmetic runs: half of the queries at once, nothing rounded on the way."""
    case = Attention(8, 1, 256, 61, 5, spare=0)
    got = case.run(source=float_operands("attention_prefill.metal", C_ROT=64), checked=True)
    # Only the result is rounded.
    assert np.abs(got[:5] - case.exact()).max() < 4e-3


def test_large_scores_do_not_overflow() -> None:
    case = Attention(2, 1, 64, 130, 2)
    case.q *= 100
    # Scores of hundreds: a GPU's order of the sums moves them by more than the last place of a probability.
    case.check("f32", tolerance=2e-5 if SLACK == 1 else 1e-3)


@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_attention_runs_clean_when_checked(act: str) -> None:
    Attention(4, 1, 64, 66, 9, spare=0).check(act, checked=True, order="random")
    Attention(8, 1, 256, 3, 3, spare=0).check(act, checked=True)


def test_tensor_attention_runs_clean_when_checked() -> None:
    Attention(2, 1, 256, 60, 9, spare=0).check(checked=True, order="random", metal=400)
