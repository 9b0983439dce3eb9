# SPDX-License-Identifier: Apache-2.0
"""Dense GEMM shaders against float64 on the weights that they multiply with (dequantised, rounded to the operand type).

Rows and outputs run over the edges of every tile; both matrix paths.  Not handled: experts (test_shaders_moe.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from msl_harness import ORDERS, needs_emulator, needs_shaders, run, step
from quantised import qrows, random_quantised
from reference import round_bf16
from shader_gemm import (
    BF16,
    METAL,
    TILES,
    check_gate_times_up,
    check_residual,
    check_router_logits,
    check_rows,
    check_width,
    close,
    float_operands,
    gemm,
    gemm_f32,
    gemm_residual,
    gemm_swiglu,
    rows_of,
    silu,
    stacked,
    weights_of,
)

from lily.policy import POLICIES

pytestmark = needs_shaders


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_products_at_the_edges_of_rows(rows: int, tile: int, metal: int) -> None:
    check_rows(rows, tile, metal)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 130])
def test_products_at_the_edges_of_outputs(outputs: int, tile: int, metal: int) -> None:
    rng = np.random.default_rng(outputs)
    w, x = random_quantised(rng, outputs, 96, 4, 32), rows_of(rng, 19, 96)
    close(gemm(x, w, tile=tile, metal=metal), x.astype(float) @ weights_of(w).T, BF16)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), [(32, 32), (64, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128)])
def test_products_of_every_width_and_quantisation(k: int, group: int, bits: int, metal: int) -> None:
    check_width(k, group, bits, metal)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", TILES)
def test_no_result_depends_on_the_order_of_threads(tile: int, order: str, metal: int) -> None:
    rng = np.random.default_rng(3)
    w, x = random_quantised(rng, 70, 96, 4, 32), rows_of(rng, 70, 96)
    close(gemm(x, w, tile=tile, order=order, seed=5, metal=metal), x.astype(float) @ weights_of(w).T, BF16)


def test_512_rows() -> None:
    rng = np.random.default_rng(4)
    w, x = random_quantised(rng, 33, 32, 8, 32), rows_of(rng, 512, 32)
    close(gemm(x, w, tile=64), x.astype(float) @ weights_of(w).T, BF16)


def test_a_segment_writes_its_own_columns_of_its_own_rows() -> None:
    rng = np.random.default_rng(5)
    w, x = random_quantised(rng, 37, 64, 4, 64), rows_of(rng, 20, 64)
    y = gemm(x, w, tile=16, pitch=101, column=11, rows=18)
    close(y[:18, 11:48], x[:18].astype(float) @ weights_of(w).T, BF16)
    rest = np.delete(y[:18], np.s_[11:48], 1)
    assert np.isnan(rest.astype(float)).all()
    assert np.isnan(y[18:].astype(float)).all()


@pytest.mark.parametrize("tile", TILES)
def test_float_operands_are_not_rounded(tile: int) -> None:
    rng = np.random.default_rng(6)
    gate, up = (random_quantised(rng, 33, 96, 8, 32) for _ in range(2))
    w, x = stacked(gate, up), rows_of(rng, 33, 96)
    source, exact = float_operands("gemm.metal"), x.astype(float) @ weights_of(w, exact=True).T
    want = silu(exact[:, :33]) * exact[:, 33:]
    for got, true in (
        (gemm(x, w, tile=tile, source=source, checked=True), exact),
        (gemm_swiglu(x, w, tile, source=source, order="random")["y"], want),
    ):
        # Only the result is rounded; with bf16 weights a third of the results would differ.
        assert (got.astype(np.float32) == round_bf16(true.astype(np.float32))).mean() > 0.99


@pytest.mark.parametrize("tile", TILES)
def test_float_activations(tile: int) -> None:
    rng = np.random.default_rng(7)
    w, x = random_quantised(rng, 48, 96, 8, 32), rng.normal(size=(33, 96)).astype(np.float32)
    columns = POLICIES["metal"].tile_columns(tile)
    arrays = {"step": step(0, 33), "x": x, "w": qrows(w), "y": np.zeros((33, 48), np.float32)}
    params = {"n": 48, "k": 96, "pitch": 48, "column": 0, "tile_n": columns}
    grid = (-(-48 // columns), -(-33 // tile))
    y = run("gemm", arrays, params, {**w.constants, "tile_m": tile}, grid=grid, threads=(128,), act="f32")["y"]
    close(y, x.astype(float) @ weights_of(w, exact=True).T, 1e-5)


# ---- float32 results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", TILES)
def test_router_logits_are_products_in_float32(tile: int, bits: int) -> None:
    check_router_logits(tile, bits)


@pytest.mark.parametrize(("first", "limit", "rows"), [(0, 8, 20), (16, 8, 20), (8, 8, 20), (24, 8, 20), (5, 40, 20)])
def test_a_window_of_rows(first: int, limit: int, rows: int) -> None:
    rng = np.random.default_rng(first)
    w, x = random_quantised(rng, 9, 32, 4, 32), rows_of(rng, 64, 32)
    y = gemm_f32(x, w, tile=16, first=first, limit=limit, rows=rows)
    real = max(0, min(limit, rows - first))
    close(y[:real], x[first : first + real].astype(float) @ weights_of(w, exact=True).T, 1e-5)
    assert np.isnan(y[real:]).all()


# ---- fused epilogues ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "outputs", "bits"), [(1, 64, 4), (9, 31, 8), (33, 33, 4), (65, 8, 4)])
def test_gate_times_up(rows: int, outputs: int, bits: int, tile: int, metal: int) -> None:
    check_gate_times_up(rows, outputs, bits, tile, metal)


@pytest.mark.parametrize("metal", METAL)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("rows", "outputs", "bits"), [(1, 64, 8), (9, 31, 4), (33, 65, 4)])
def test_products_are_added_to_the_residual(rows: int, outputs: int, bits: int, tile: int, metal: int) -> None:
    check_residual(rows, outputs, bits, tile, metal)


# ---- checked --------------------------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize(("bits", "metal"), [(4, 320), (8, 400)])
@pytest.mark.parametrize("tile", TILES)
def test_dense_products_run_clean_when_checked(tile: int, bits: int, metal: int) -> None:
    rng = np.random.default_rng(bits)
    w, x = random_quantised(rng, 34, 96, bits, 32), rows_of(rng, 21, 96)
    gemm(x, w, tile=tile, checked=True, metal=metal)
    gemm_f32(x, w, tile=tile, first=3, limit=9, rows=21, checked=True, order="random", metal=metal)
    gemm_swiglu(x, w, tile, checked=True, order="reverse", metal=metal)
    gemm_residual(x, w, rows_of(rng, 21, 34), tile, checked=True, order="random", metal=metal)


@pytest.mark.parametrize("metal", METAL)
def test_nothing_beyond_a_matrix_is_read(metal: int) -> None:
    """All sections of this one end at a multiple of 256 bytes: there is no padding that would hide a read."""
    rng = np.random.default_rng(8)
    w, x = random_quantised(rng, 128, 96, 4, 32), rows_of(rng, 5, 96)
    assert len(qrows(w)) == 128 * (96 // 2 + 2 * 2 * 96 // 32)
    close(gemm(x, w, tile=32, checked=True, metal=metal), x.astype(float) @ weights_of(w).T, BF16)
