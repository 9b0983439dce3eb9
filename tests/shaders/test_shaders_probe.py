# SPDX-License-Identifier: Apache-2.0
"""probe.metal, emulated, against integers that bfloat16 and float32 hold exactly; both matrix paths.

Not handled: whether the probes reach what a GPU can do.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msl_harness import ORDERS, Run, needs_shaders, run

pytestmark = needs_shaders


def level(**options: Any) -> Run:
    out = run("probe_level", {"x": np.array([41, 7, 7, 7], np.uint32)}, threads=(32,), **options)
    np.testing.assert_array_equal(out["x"], [42, 7, 7, 7])
    return out


@pytest.mark.parametrize("order", ORDERS)
def test_level_counts(order: str) -> None:
    assert level(order=order, checked=True).distinct_written == 4


def read(size: int, block: int, threads: int, **options: Any) -> Any:
    src = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    groups = -(-size // block)
    out = run(
        "probe_read", {"src": src, "sums": np.zeros(groups, np.uint32)}, {"bytes": size, "block": block},
        grid=(groups,), threads=(threads,), **options,
    )  # fmt: skip
    padded = np.concatenate([src, np.zeros(-size % block, np.uint8)]).view(np.uint32).reshape(groups, -1)
    np.testing.assert_array_equal(out["sums"], padded.sum(1, dtype=np.uint32))
    return out


@pytest.mark.parametrize("size", [16, 2032, 2048, 2064, 8192, 20_000])
@pytest.mark.parametrize(("block", "threads"), [(64, 32), (4096, 64), (4096, 256)])
def test_read_sums_every_word_of_its_block_once(size: int, block: int, threads: int) -> None:
    read(size, block, threads)


@pytest.mark.parametrize("order", ORDERS)
def test_read_reads_each_byte_once_and_is_clean_when_checked(order: str) -> None:
    out = read(20_000, 8192, 128, order=order, checked=True)
    assert out.distinct_read == 20_000 + 8
    assert out.bytes_read <= 20_000 + 8 * 128 * 8


def matrix(rounds: int, groups: int = 2, act: str = "bf16", **options: Any) -> None:
    r = np.random.default_rng(rounds)
    dtype = np.float32 if act == "f32" else ml_dtypes.bfloat16
    x, w = r.integers(-8, 9, (2, 64, 64)).astype(dtype)
    arrays = {"x": x, "w": w, "y": np.zeros((groups, 64, 64), np.float32)}
    out = run("probe_matrix", arrays, {"rounds": rounds}, grid=(groups,), threads=(128,), act=act, **options)
    want = rounds * (x.astype(float) @ w.astype(float).T)
    np.testing.assert_array_equal(out["y"], np.broadcast_to(want, (groups, 64, 64)))


@pytest.mark.parametrize("metal", [320, 400])
@pytest.mark.parametrize("order", ORDERS)
def test_matrix_adds_the_same_product_in_every_round(metal: int, order: str) -> None:
    matrix(3, metal=metal, order=order)


@pytest.mark.parametrize("metal", [320, 400])
def test_matrix_is_clean_when_checked(metal: int) -> None:
    matrix(2, groups=1, metal=metal, order="random", checked=True)


@pytest.mark.parametrize("metal", [320, 400])
def test_matrix_takes_float_activations(metal: int) -> None:
    matrix(2, groups=1, act="f32", metal=metal)
