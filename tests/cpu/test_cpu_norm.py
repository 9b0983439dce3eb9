# SPDX-License-Identifier: Apache-2.0
"""rmsnorm, swiglu, last_row and copy against float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import fill, run, same_bits, step

from lily.device.device import Device


@pytest.mark.parametrize("rows", [1, 2, 9, 33])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100, 256, 2048, 2049])
def test_rmsnorm_follows_the_formula(device: Device, rows: int, width: int) -> None:
    r = np.random.default_rng(width)
    x, w = (r.normal(0, 3, (rows + 2, width)).astype(np.float32), r.normal(1, 0.3, width).astype(np.float32))
    args = {"step": step(0, rows), "x": x, "norm": w, "y": fill(x.shape)}
    y = run(device, "rmsnorm", args, {"k": width, "eps": 1e-6}, grid=(rows + 2,))["y"]
    z = x[:rows].astype(float)
    np.testing.assert_allclose(y[:rows], z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6) * w, rtol=1e-6)
    assert np.isnan(y[rows:]).all()


def test_rmsnorm_uses_its_epsilon(device: Device) -> None:
    x, w = np.full((1, 64), 1e-3, np.float32), np.ones(64, np.float32)
    args = {"step": step(), "x": x, "norm": w, "y": fill(x.shape)}
    for eps in (1e-6, 1e-2):
        y = run(device, "rmsnorm", args, {"k": 64, "eps": eps})["y"]
        np.testing.assert_allclose(y, 1e-3 / np.sqrt(1e-6 + eps), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 16, 33, 512])
def test_swiglu_from_end_to_end_of_its_range(device: Device, width: int) -> None:
    gate = np.linspace(-110, 110, 5 * width).reshape(5, width).astype(np.float32)
    up = np.where(np.arange(5 * width) % 2, 1, -1).reshape(5, width).astype(np.float32)
    args = {"gate": gate, "up": up, "y": fill((7, width))}
    y = run(device, "swiglu", args, {"n": width, "rows": 5}, grid=(7,))["y"]
    g = gate.astype(float)
    # e^88.7 is the last exponential that float32 holds; what lies beyond becomes 0.
    np.testing.assert_allclose(y[:5], g / (1 + np.exp(-g)) * up, rtol=1e-6, atol=2.7e-37)
    assert np.isnan(y[5:]).all()


def test_tails_have_the_bits_of_whole_vectors(device: Device) -> None:
    r = np.random.default_rng(2)
    gate, up = r.normal(0, 4, (2, 1, 37)).astype(np.float32)
    whole = run(device, "swiglu", {"gate": gate, "up": up, "y": fill((1, 37))}, {"n": 37, "rows": 1})["y"]
    for n in range(1, 37):
        part = {"gate": gate[:, 37 - n :].copy(), "up": up[:, 37 - n :].copy(), "y": fill((1, n))}
        assert same_bits(run(device, "swiglu", part, {"n": n, "rows": 1})["y"], whole[:, 37 - n :])


def test_last_row_is_the_last_of_the_step(device: Device) -> None:
    x = np.arange(5 * 48, dtype=np.float32).reshape(5, 48)
    y = run(device, "last_row", {"step": step(7, 3), "x": x, "y": fill(48)}, {"hidden": 48})["y"]
    np.testing.assert_array_equal(y, x[2])


@pytest.mark.parametrize("size", [16, 65_520, 65_536, 65_552, 200_000])
def test_copy_copies_every_byte(device: Device, size: int) -> None:
    src = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    out = run(device, "copy", {"src": src, "dst": np.zeros_like(src)}, {"bytes": size}, grid=(-(-size // 65536),))
    np.testing.assert_array_equal(out["dst"], src)
