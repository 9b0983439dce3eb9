# SPDX-License-Identifier: Apache-2.0
"""Runs the shaders of dense products, and holds them to float64 on the weights that they multiply with.

test_shaders_gemm.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from msl_harness import SLACK, Array, Run, bf16, matrix_operands, run, step
from quantised import Quantised, qrows, random_quantised
from reference import round_bf16

from lily.msl.flatten import preamble, shader_files
from lily.policy import POLICIES

TILES = (16, 32, 64)
METAL = (320, 400)  # simdgroup_matrix, tensor operations


def weights_of(*parts: Quantised, exact: bool = False) -> Array:
    """float64 of what is multiplied: bf16 operands unless ``exact``, or the GPU multiplies floats."""
    dense = np.concatenate([p.dense for p in parts])
    return dense if exact or matrix_operands() == "f32" else rounded(dense)


def rounded(dense: Array) -> Array:
    return round_bf16(dense.astype(np.float32)).astype(np.float64)


def stacked(*parts: Quantised) -> Quantised:
    values, scales, biases = (np.concatenate([getattr(p, f) for p in parts]) for f in ("values", "scales", "biases"))
    return Quantised(values, scales, biases, parts[0].bits, parts[0].group)


def rows_of(rng: np.random.Generator, m: int, k: int) -> Array:
    return bf16(rng.normal(size=(m, k)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def close(got: Array, want: Array, relative: float, absolute: float = 2e-5) -> None:
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=relative, atol=absolute * SLACK)


BF16 = 2.0**-8  # half a unit in the last place, twice: sums differ by their order before they are rounded


def gemm(
    x: Array, w: Quantised, *, tile: int, pitch: int = 0, column: int = 0, rows: int | None = None, **options: Any,
) -> Array:  # fmt: skip
    (m, k), n = x.shape, len(w.values)
    pitch, columns = pitch or n, POLICIES["metal"].tile_columns(tile)
    arrays = {
        "step": step(0, m if rows is None else rows), "x": x, "w": qrows(w), "y": bf16(np.full((m, pitch), 7)),
    }  # fmt: skip
    params = {"n": n, "k": k, "pitch": pitch, "column": column, "tile_n": columns}
    grid = (-(-n // columns), -(-m // tile))
    return run("gemm", arrays, params, {**w.constants, "tile_m": tile}, grid=grid, threads=(128,), **options)["y"]


def check_rows(rows: int, tile: int, metal: int) -> None:
    rng = np.random.default_rng(rows)
    w, x = random_quantised(rng, 40, 64, 4, 64), rows_of(rng, rows, 64)
    close(gemm(x, w, tile=tile, metal=metal), x.astype(float) @ weights_of(w).T, BF16)


def check_width(k: int, group: int, bits: int, metal: int) -> None:
    rng = np.random.default_rng(k + bits)
    w, x = random_quantised(rng, 33, k, bits, group), rows_of(rng, 17, k)
    close(gemm(x, w, tile=32, metal=metal), x.astype(float) @ weights_of(w).T, BF16)


def float_operands(file: str, **fixed: int) -> str:
    """One shader file as a GPU without bfloat arithmetic gets it; ``fixed``: constants that the kernel lacks."""
    source = "#define LILY_MATRIX_F32 1\n" + preamble()
    for name, value in fixed.items():
        source = re.sub(rf"constant int {name} \[\[.*\]\];", f"constant constexpr int {name} = {value};", source)
    files = [f for f in shader_files() if f.suffix == ".h" or f.name == file]
    return source + "".join(re.sub(r'#include ".*"', "", f.read_text()) for f in files)


def gemm_f32(x: Array, w: Quantised, *, tile: int, first: int, limit: int, rows: int, **options: Any) -> Array:
    k, n, columns = x.shape[1], len(w.values), POLICIES["metal"].tile_columns(tile)
    arrays = {"step": step(0, rows), "x": x, "w": qrows(w), "y": np.zeros((limit, n), np.float32)}
    params = {
        "n": n, "k": k, "pitch": n, "column": 0, "first": first, "limit": limit, "tile_n": columns,
    }  # fmt: skip
    grid = (-(-n // columns), -(-limit // tile))
    return run("gemm_f32", arrays, params, {**w.constants, "tile_m": tile}, grid=grid, threads=(128,), **options)["y"]


def check_router_logits(tile: int, bits: int) -> None:
    rng = np.random.default_rng(tile + bits)
    w, x = random_quantised(rng, 65, 128, bits, 64), rows_of(rng, 35, 128)
    close(gemm_f32(x, w, tile=tile, first=0, limit=35, rows=35), x.astype(float) @ weights_of(w, exact=True).T, 1e-5)


def gemm_swiglu(x: Array, w: Quantised, tile: int, **options: Any) -> Run:
    (m, k), n = x.shape, len(w.values) // 2
    columns = POLICIES["metal"].tile_columns(tile, 2)
    arrays = {"step": step(0, m), "x": x, "w": qrows(w), "y": bf16(np.zeros((m, n)))}
    params = {"n": n, "k": k, "tile_n": columns}
    constants, grid = {**w.constants, "tile_m": tile}, (-(-n // columns), -(-m // tile))
    return run("gemm_swiglu", arrays, params, constants, grid=grid, threads=(128,), **options)


def check_gate_times_up(rows: int, outputs: int, bits: int, tile: int, metal: int) -> None:
    rng = np.random.default_rng(rows)
    gate, up = (random_quantised(rng, outputs, 64, bits, 32) for _ in range(2))
    x = rows_of(rng, rows, 64)
    want = silu(x.astype(float) @ weights_of(gate).T) * (x.astype(float) @ weights_of(up).T)
    close(gemm_swiglu(x, stacked(gate, up), tile, metal=metal)["y"], want, BF16)


def gemm_residual(y: Array, w: Quantised, x: Array, tile: int, **options: Any) -> Array:
    (m, k), n, columns = y.shape, len(w.values), POLICIES["metal"].tile_columns(tile)
    arrays = {"step": step(0, m), "y": y, "w": qrows(w), "x": x}
    params = {"n": n, "k": k, "tile_n": columns}
    grid = (-(-n // columns), -(-m // tile))
    constants = {**w.constants, "tile_m": tile}
    return run("gemm_residual", arrays, params, constants, grid=grid, threads=(128,), **options)["x"]


def check_residual(rows: int, outputs: int, bits: int, tile: int, metal: int) -> None:
    rng = np.random.default_rng(rows)
    w, y, x = random_quantised(rng, outputs, 96, bits, 32), rows_of(rng, rows, 96), rows_of(rng, rows, outputs)
    want = x.astype(float) + y.astype(float) @ weights_of(w).T
    close(gemm_residual(y, w, x, tile, metal=metal), want, BF16)
