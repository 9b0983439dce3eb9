# SPDX-License-Identifier: Apache-2.0
"""Matrix kernels of the CPU device against float64 on the dequantised weights, on every path that this machine has.

Accuracy is that of the path: with AVX512-BF16 the activations of 4-bit matrices are rounded to bf16, so the reference
rounds them too.  Bit-identity between kernels, row counts, threads and tiles is exact, without a tolerance.
Not handled: speed (bench/).
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import Array, fill, open_device, run
from quantised import Quantised, qrows, random_quantised, rows16
from reference import round_bf16

from lily.device.device import Device

EPS = 1e-6


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def activations(device: Device, x: Array, bits: int) -> Array:
    """float64 values of what the path multiplies with."""
    rounds = device.info["isa"] in ("amx", "avx512bf16") and bits == 4
    return (round_bf16(x) if rounds else np.asarray(x)).astype(np.float64)


def close(result: Array, exact: Array, magnitude: Array) -> None:
    """Errors of float32 sums, relative to the sum of the terms' absolute values."""
    error = np.abs(result.astype(np.float64) - exact)
    assert np.all(np.isfinite(result))
    assert np.max(error / (magnitude + 1e-6)) < 2e-6


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def norm(x: Array, w: Array) -> Array:
    x = x.astype(np.float64)
    return (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * w).astype(np.float32)


def step(rows: int) -> Array:
    return np.array([0, rows, 0, 0], np.int32)


def blocks(n: int, per_group: int = 16) -> int:
    return -(-n // per_group)


def gemm(device: Device, w: Quantised, x: Array, *, tile_m: int = 1 << 20, tile_n: int = 16) -> Array:
    n, k = w.values.shape
    arrays = {"step": step(len(x)), "x": x, "w": rows16(w), "y": fill((len(x), n))}
    params = {"n": n, "k": k, "pitch": n, "column": 0, "tile_n": tile_n}
    grid = (blocks(n, tile_n), blocks(len(x), tile_m))
    return run(device, "gemm", arrays, params, {**w.constants, "tile_m": tile_m}, grid)["y"]


def gemv(device: Device, w: Quantised, x: Array, per_group: int = 16) -> Array:
    n, k = w.values.shape
    arrays = {"x": x, "w": rows16(w), "y": fill(n)}
    params = {"n": n, "k": k, "rows_per_group": per_group}
    return run(device, "gemv", arrays, params, w.constants, (blocks(n, per_group),))["y"]


def rmsnorm(device: Device, x: Array, weight: Array) -> Array:
    """The device's own norm of the rows of x."""
    arrays = {"step": step(len(x)), "x": x, "norm": weight, "y": fill(x.shape)}
    return run(device, "rmsnorm", arrays, {"k": x.shape[1], "eps": EPS}, {}, (len(x),))["y"]


# ---- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group", "k"), [(32, 32), (32, 96), (64, 64), (64, 192), (128, 128), (128, 384)], ids=lambda v: str(v)
)
def test_gemv_equals_the_dequantised_product(
    device: Device, rng: np.random.Generator, bits: int, group: int, k: int
) -> None:
    for n in (1, 15, 16, 17, 33, 48):
        w = random_quantised(rng, n, k, bits, group)
        x = rng.normal(size=k).astype(np.float32)
        exact = activations(device, x, bits)
        close(gemv(device, w, x), w.dense @ exact, np.abs(w.dense) @ np.abs(exact))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 65])
def test_gemm_equals_the_dequantised_product(device: Device, rng: np.random.Generator, bits: int, rows: int) -> None:
    for n, k, group in ((17, 64, 32), (40, 192, 64), (16, 256, 128)):
        w = random_quantised(rng, n, k, bits, group)
        x = rng.normal(size=(rows, k)).astype(np.float32)
        exact = activations(device, x, bits)
        close(gemm(device, w, x), exact @ w.dense.T, np.abs(exact) @ np.abs(w.dense.T))


def test_gemm_writes_only_its_columns_and_rows(device: Device, rng: np.random.Generator) -> None:
    w = random_quantised(rng, 21, 64, 4, 64)
    x = rng.normal(size=(5, 64)).astype(np.float32)
    arrays = {"step": step(3), "x": x, "w": rows16(w), "y": fill((5, 40))}
    params = {"n": 21, "k": 64, "pitch": 40, "column": 8, "tile_n": 16}
    got = run(device, "gemm", arrays, params, {**w.constants, "tile_m": 512}, (2, 1))["y"]
    assert np.array_equal(got[:3, 8:29], gemm(device, w, x[:3]))
    written = np.zeros((5, 40), bool)
    written[:3, 8:29] = True
    assert np.all(np.isnan(got[~written]))


def test_gemm_f32_computes_the_rows_of_its_window(device: Device, rng: np.random.Generator) -> None:
    w = random_quantised(rng, 33, 64, 8, 64)
    x = rng.normal(size=(9, 64)).astype(np.float32)
    whole = gemm(device, w, x)
    for first, limit, seen in ((0, 4, 4), (4, 4, 4), (8, 4, 1), (9, 4, 0)):
        sizes = {"n": 33, "k": 64, "pitch": 33, "column": 0, "tile_n": 16}
        params = {**sizes, "first": first, "limit": limit}
        arrays = {"step": step(9), "x": x, "w": rows16(w), "y": fill((limit, 33))}
        got = run(device, "gemm_f32", arrays, params, {**w.constants, "tile_m": 512}, (3, 1))["y"]
        assert np.array_equal(got[:seen], whole[first : first + seen])
        assert np.all(np.isnan(got[seen:]))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)])
def test_embed_dequantises_rows(device: Device, rng: np.random.Generator, bits: int, group: int) -> None:
    table = random_quantised(rng, 37, 128, bits, group)
    ids = np.array([36, 0, 5, 5, 37, -1], np.int32)
    arrays = {"step": step(6), "ids": ids, "table": qrows(table), "x": fill((6, 128))}
    got = run(device, "embed", arrays, {"hidden": 128, "vocab": 37}, table.constants, (6,))["x"]
    assert np.allclose(got[:4], table.dense[ids[:4]], rtol=1e-6, atol=1e-7)
    assert np.all(np.isnan(got[4:]))  # ids outside of the table


def test_large_and_tiny_activations_lose_nothing(device: Device, rng: np.random.Generator) -> None:
    w = random_quantised(rng, 16, 64, 4, 64)
    x = rng.normal(size=64).astype(np.float32)
    for scale in (2.0**-60, 2.0**60):
        assert np.array_equal(gemv(device, w, x * np.float32(scale)), gemv(device, w, x) * np.float32(scale))


# ---- fused kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, 16, 40])
def test_swiglu_kernels(device: Device, rng: np.random.Generator, bits: int, n: int) -> None:
    k, rows = 128, 19
    g, u = (random_quantised(rng, n, k, bits, 32) for _ in range(2))
    x, weight = rng.normal(size=(rows, k)).astype(np.float32), rng.normal(size=k).astype(np.float32)
    h = rmsnorm(device, x, weight)
    params = {"n": n, "k": k, "tile_n": 16}
    arrays = {"step": step(rows), "x": h, "w": rows16(g, u), "y": fill((rows, n))}
    many = run(device, "gemm_swiglu", arrays, params, {**g.constants, "tile_m": 512}, (blocks(n), 1))["y"]
    exact = activations(device, h, bits)
    gate, up = exact @ g.dense.T, exact @ u.dense.T
    assert np.allclose(many, silu(gate) * up, rtol=1e-4, atol=1e-5)
    for m in (0, rows - 1):
        arrays = {"x": x[m], "norm": weight, "w": rows16(g, u), "y": fill(n)}
        params = {"n": n, "k": k, "eps": EPS, "rows_per_group": 16}
        one = run(device, "gemv_norm_swiglu", arrays, params, g.constants, (blocks(n),))["y"]
        assert np.array_equal(one, many[m])


@pytest.mark.parametrize("kernel", ["gemv_norm", "gemv_norm_f32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_fused_norm_equals_norm_then_product(device: Device, rng: np.random.Generator, kernel: str, bits: int) -> None:
    n, k = 50, 192
    w = random_quantised(rng, n, k, bits, 64)
    x, weight = 3 * rng.normal(size=(4, k)).astype(np.float32), rng.normal(size=k).astype(np.float32)
    h = rmsnorm(device, x, weight)
    assert np.allclose(h, norm(x, weight), rtol=1e-5, atol=1e-6)
    many = gemm(device, w, h)
    for m in range(4):
        arrays = {"x": x[m], "norm": weight, "w": rows16(w), "y": fill(n)}
        params = {"n": n, "k": k, "eps": EPS, "rows_per_group": 16}
        assert np.array_equal(run(device, kernel, arrays, params, w.constants, (4,))["y"], many[m])


@pytest.mark.parametrize("bits", [4, 8])
def test_residual_kernels_add_the_product(device: Device, rng: np.random.Generator, bits: int) -> None:
    n, k, rows = 35, 64, 5
    w = random_quantised(rng, n, k, bits, 32)
    y, x = rng.normal(size=(rows, k)).astype(np.float32), rng.normal(size=(rows, n)).astype(np.float32)
    expected = gemm(device, w, y) + x
    arrays = {"step": step(rows), "y": y, "w": rows16(w), "x": x}
    params = {"n": n, "k": k, "tile_n": 16}
    constants = {**w.constants, "tile_m": 512}
    assert np.array_equal(run(device, "gemm_residual", arrays, params, constants, (3, 1))["x"], expected)
    arrays = {"y": y[2], "w": rows16(w), "x": x[2].copy()}
    params = {"n": n, "k": k, "rows_per_group": 16}
    assert np.array_equal(run(device, "gemv_residual", arrays, params, w.constants, (3,))["x"], expected[2])


def test_gated_residual_gates_each_head_with_its_own_half(device: Device, rng: np.random.Generator) -> None:
    heads, dim, n = 3, 64, 20
    k = heads * dim
    w = random_quantised(rng, n, k, 4, 64)
    o, x = rng.normal(size=k).astype(np.float32), rng.normal(size=n).astype(np.float32)
    proj = rng.normal(size=2 * k + 128).astype(np.float32)
    gate = proj[: 2 * k].reshape(heads, 2, dim)[:, 1].reshape(-1).astype(np.float64)
    gated = (o / (1 + np.exp(-gate))).astype(np.float32)
    arrays = {"o": o, "proj": proj, "w": rows16(w), "x": x}
    params = {"n": n, "k": k, "dim": dim, "rows_per_group": 16}
    got = run(device, "gemv_gated_residual", arrays, params, w.constants, (2,))["x"]
    # A gated value at a rounding edge may round the other way: one part in 256 of one term.
    assert np.allclose(got, w.dense @ activations(device, gated, 4) + x, rtol=1e-3, atol=2e-3)


# ---- bit-identity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_among_any_number_of_rows(device: Device, rng: np.random.Generator, bits: int) -> None:
    w = random_quantised(rng, 40, 192, bits, 64)
    x = rng.normal(size=(67, 192)).astype(np.float32)
    alone = np.stack([gemv(device, w, row) for row in x])
    for rows in (1, 2, 3, 5, 16, 17, 23, 67):
        assert np.array_equal(gemm(device, w, x[:rows]), alone[:rows])
    for tile_m, tile_n in ((8, 16), (20, 32), (33, 48)):
        assert np.array_equal(gemm(device, w, x, tile_m=tile_m, tile_n=tile_n), alone)
    for per_group in (32, 64):
        assert np.array_equal(gemv(device, w, x[0], per_group), alone[0])


def test_more_rows_than_are_packed_at_a_time(device: Device, rng: np.random.Generator) -> None:
    w = random_quantised(rng, 16, 32, 4, 32)
    x = rng.normal(size=(1100, 32)).astype(np.float32)
    whole = gemm(device, w, x)
    for first in (0, 500, 512, 1090):
        assert np.array_equal(gemm(device, w, x[first : first + 10]), whole[first : first + 10])


@pytest.mark.native("opens a device of its own")
def test_results_do_not_depend_on_threads(device: Device, rng: np.random.Generator) -> None:
    w = random_quantised(rng, 300, 128, 4, 64)
    x = rng.normal(size=(40, 128)).astype(np.float32)
    expected, row = gemm(device, w, x), gemv(device, w, x[0])
    for threads in (1, 2, 3, 4):
        other = open_device(device.info["isa"], threads)
        assert np.array_equal(gemm(other, w, x), expected)
        assert np.array_equal(gemv(other, w, x[0]), row)
