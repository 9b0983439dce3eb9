# SPDX-License-Identifier: Apache-2.0
"""Kernels that others wrote and that run on Macs, unmodified, through the translator and the emulator.

MLX's kernel headers come from its wheel for macOS, fetched when the test runs; nothing of them lies in this repository.
Their results are held to formulas in float64.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msl_build import CACHE
from msl_harness import bf16, needs_clang, run

pytestmark = [needs_clang, pytest.mark.full]

WHEEL = "mlx-metal==0.32.4"
FOLDER = CACHE / "mlx"
ORDERS = ("forward", "reverse", "random")


@pytest.fixture(scope="module")
def resolve() -> Callable[[str, str, bool], tuple[str, str] | None]:
    """Finds MLX's headers; they are downloaded once."""
    include = FOLDER / "mlx" / "include"
    if not include.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "macosx_15_0_arm64", "--python-version", "3.12", "-d", str(FOLDER), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip("the wheel mlx-metal cannot be downloaded here")
        wheel = next(FOLDER.glob("mlx_metal*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(FOLDER, [n for n in archive.namelist() if "/metal/kernels/" in n and n.endswith(".h")])
        wheel.unlink()

    def find(including: str, name: str, quoted: bool) -> tuple[str, str] | None:
        for ending, text in REPLACED.items():
            if name.endswith(ending):
                return name, "#pragma once\n" + text
        for folder in (include, Path(including).parent):
            path = folder / name
            if quoted and path.exists():
                return str(path), path.read_text()
        return None

    return find


# Functions of bfloat by names that only Apple's compiler knows, and members told apart by address space alone.
REPLACED = {
    "/bf16_math.h": "",
    "/complex.h": "template <typename T> struct complex_t { T real, imag; };\ntypedef complex_t<float> complex64_t;\n",
    "/logging.h": "",
    "/type_traits.h": """namespace metal {
        template <typename T> struct pointer_element {};
        template <typename T> struct pointer_element<T *> { using type = remove_cv_t<T>; };
        template <typename T> using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
    }\n""",
}
HEAD = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
KERNELS = "mlx/backend/metal/kernels"


def _quantised(rng: np.random.Generator, n: int, k: int, bits: int, group: int) -> tuple[object, ...]:
    """Words, scales and biases of a random matrix, and its values in float64."""
    q = rng.integers(0, 1 << bits, (n, k)).astype(np.uint32)
    scales, biases = bf16(rng.random((n, k // group)) * 0.02), bf16(rng.standard_normal((n, k // group)) * 0.1)
    per_word = 32 // bits
    words = (q.reshape(n, -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)
    wide = [np.repeat(a.astype(np.float64), group, 1) for a in (scales, biases)]
    return words, scales, biases, q * wide[0] + wide[1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_matrix_times_vector(resolve: object, bits: int, order: str) -> None:
    n, k, group = 64, 512, 64
    source = f"""{HEAD}#include "{KERNELS}/steel/gemm/gemm.h"
        #include "{KERNELS}/quantized_utils.h"
        #include "{KERNELS}/quantized.h"
        template [[host_name("qmv")]] [[kernel]] decltype(affine_qmv<bfloat16_t, {group}, {bits}, false>)
            affine_qmv<bfloat16_t, {group}, {bits}, false>;"""
    rng = np.random.default_rng(bits)
    words, scales, biases, w = _quantised(rng, n, k, bits, group)
    x = bf16(rng.standard_normal(k))
    int32 = lambda *v: np.array(v, np.int32)  # noqa: E731
    none = np.zeros(4, np.int64)
    arrays = {
        "w": words, "scales": scales, "biases": biases, "x": x, "y": bf16(np.zeros(n)), "k": int32(k), "n": int32(n),
        "xd": int32(0), "xs": none, "xt": none, "wd": int32(0), "ws": none, "wt": none, "st": none, "bt": none,
    }  # fmt: skip
    out = run(
        "qmv", arrays, grid=(1, n // 8), threads=(32, 2), source=source, resolve=resolve, order=order, checked=True
    )
    want = w @ x.astype(np.float64)
    np.testing.assert_allclose(out["y"].astype(np.float64), want, atol=np.abs(want).max() * 2**-8)


@pytest.mark.parametrize("order", ORDERS)
def test_quantised_matrix_product_on_simdgroup_matrices(resolve: object, order: str) -> None:
    m, n, k, group = 40, 64, 128, 64
    source = f"""{HEAD}#include "{KERNELS}/steel/gemm/gemm.h"
        #include "{KERNELS}/quantized_utils.h"
        #include "{KERNELS}/quantized.h"
        template [[host_name("qmm")]] [[kernel]] decltype(affine_qmm_t<bfloat16_t, {group}, 4, true, false>)
            affine_qmm_t<bfloat16_t, {group}, 4, true, false>;"""
    rng = np.random.default_rng(1)
    words, scales, biases, w = _quantised(rng, n, k, 4, group)
    x = bf16(rng.standard_normal((m, k)))
    int32 = lambda *v: np.array(v, np.int32)  # noqa: E731
    none = np.zeros(4, np.int64)
    arrays = {
        "w": words, "scales": scales, "biases": biases, "x": x, "y": bf16(np.zeros((m, n))), "k": int32(k),
        "n": int32(n), "m": int32(m), "xd": int32(0), "xs": none, "xt": none, "wd": int32(0), "ws": none, "wt": none,
        "st": none, "bt": none,
    }  # fmt: skip
    grid = n // 32, -(-m // 32)
    out = run("qmm", arrays, grid=grid, threads=(32, 2, 2), source=source, resolve=resolve, order=order, checked=True)
    want = x.astype(np.float64) @ w.T
    np.testing.assert_allclose(out["y"].astype(np.float64), want, atol=np.abs(want).max() * 2**-7)


@pytest.mark.parametrize("order", ORDERS)
def test_softmax(resolve: object, order: str) -> None:
    rows, n = 3, 1000
    source = f"""{HEAD}#include "{KERNELS}/softmax.h"
        template [[host_name("softmax")]] [[kernel]] decltype(softmax_single_row<float, float>)
            softmax_single_row<float, float>;"""
    x = np.random.default_rng(2).standard_normal((rows, n)).astype(np.float32) * 3
    arrays = {"x": x, "y": np.zeros_like(x), "n": np.array([n], np.int32)}
    out = run(
        "softmax", arrays, grid=(rows,), threads=(256,), source=source, resolve=resolve, order=order, checked=True
    )
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(out["y"], e / e.sum(-1, keepdims=True), rtol=2e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_attention_of_one_query(resolve: object, order: str) -> None:
    heads, kv_heads, n, d = 4, 2, 77, 128
    source = f"""{HEAD}#include "{KERNELS}/sdpa_vector.h"
        template [[host_name("sdpa")]] [[kernel]] decltype(sdpa_vector<half, {d}, {d}>) sdpa_vector<half, {d}, {d}>;"""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((h, s, d)).astype(np.float16) for h, s in ((heads, 1), (kv_heads, n), (kv_heads, n)))
    int32, size = (lambda t: lambda *x: np.array(x, t))(np.int32), (lambda *x: np.array(x, np.uint64))
    arrays = {
        "q": q, "k": k, "v": v, "o": np.zeros((heads, d), np.float16), "gqa": int32(heads // kv_heads), "n": int32(n),
        "kh": size(n * d), "ks": size(d), "vh": size(n * d), "vs": size(d), "scale": np.array([d**-0.5], np.float32),
    }  # fmt: skip
    off = dict.fromkeys(("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks"), False)
    out = run(
        "sdpa", arrays, constants=off, grid=(heads, 1), threads=(1024,), source=source, resolve=resolve, order=order,
        checked=True,
    )  # fmt: skip
    k2, v2 = (np.repeat(a.astype(np.float64), heads // kv_heads, 0) for a in (k, v))
    s = np.einsum("hd,hsd->hs", q[:, 0].astype(np.float64), k2) * d**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hs,hsd->hd", p / p.sum(-1, keepdims=True), v2)
    np.testing.assert_allclose(out["o"], want, atol=2e-3)
