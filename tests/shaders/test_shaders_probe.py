# SPDX-License-Identifier: Apache-2.0
"""probe.metal, emulated, against integers that bfloat16 and float32 hold exactly; both matrix paths.

Not handled: whether the probes reach what a GPU can do.
"""

from __future__ import annotations

import pytest
from msl_harness import ORDERS, needs_shaders
from shader_probe import level, matrix, read

pytestmark = needs_shaders


@pytest.mark.parametrize("order", ORDERS)
def test_level_counts(order: str) -> None:
    assert level(order=order, checked=True).distinct_written == 4


@pytest.mark.parametrize("size", [16, 2032, 2048, 2064, 8192, 20_000])
@pytest.mark.parametrize(("block", "threads"), [(64, 32), (4096, 64), (4096, 256)])
def test_read_sums_every_word_of_its_block_once(size: int, block: int, threads: int) -> None:
    read(size, block, threads)


@pytest.mark.parametrize("order", ORDERS)
def test_read_reads_each_byte_once_and_is_clean_when_checked(order: str) -> None:
    out = read(20_000, 8192, 128, order=order, checked=True)
    assert out.distinct_read == 20_000 + 8
    assert out.bytes_read <= 20_000 + 8 * 128 * 8


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
