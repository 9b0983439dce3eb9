# SPDX-License-Identifier: Apache-2.0
"""Runs the shaders of decode attention, and holds them to the float64 formulas of attention.py.

test_shaders_attention_decode.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from attention import EPS, Layer, Shape, attend, prepared
from kernel_harness import same_bits
from msl_harness import SLACK, Run, bf16, run, step

Array = Any
REAL = Shape()


def layer_of(shape: Shape, position: int, seed: int = 0) -> Layer:
    """A layer whose projected row bf16 can hold, behind ``position`` random rows of cache."""
    layer = Layer(shape, position, 1, seed)
    layer.proj = bf16(layer.proj).astype(np.float32)
    return layer


def decode(layer: Layer, split: int = 256, threads: int = 256, pack: int = 4, fixed: int = 0, **options: Any) -> Run:
    s, at = layer.shape, layer.position
    splits = -(-len(layer.k) // split) + 1
    args = {
        "step": step(at), "proj": bf16(layer.proj[0]), "q_norm": layer.q_norm, "k_norm": layer.k_norm,
        "inv_freq": layer.inv_freq, "k": layer.k.view(ml_dtypes.bfloat16), "v": layer.v.view(ml_dtypes.bfloat16),
        "part_o": np.zeros((splits, s.hq, s.dim), np.float32), "part_ml": np.zeros((splits, s.hq, 2), np.float32),
    }  # fmt: skip
    out = run(
        "attn_decode", args, {"pitch": s.pitch, "eps": EPS, "split": split},
        {**s.heads, "rot": s.rot, "pack": pack, "fixed": fixed}, grid=(splits, s.hkv), threads=(threads,), **options,
    )  # fmt: skip
    used = at // split + 1
    assert np.isfinite(out["part_o"][:used]).all()
    assert np.isnan(out["part_o"][used:]).all(), "a split beyond the position was written"
    return out


def merged(part_o: Array, part_ml: Array, splits: int) -> Array:
    """What attn_combine has to do, in float64."""
    o, ml = part_o[:splits].astype(np.float64), part_ml[:splits].astype(np.float64)
    w = np.exp(ml[..., 0] - ml[..., 0].max(0))
    return (w[..., None] * o).sum(0) / (w * ml[..., 1]).sum(0)[:, None]


def check_decode(layer: Layer, split: int = 256, **options: Any) -> Run:
    """The appended rows, everything else of the cache untouched, and the attended values."""
    at = layer.position
    q, k, v = prepared(layer)
    out = decode(layer, split, **options)
    np.testing.assert_array_equal(out["v"][at], bf16(v[0]))
    np.testing.assert_allclose(out["k"][at].astype(np.float64), k[0], rtol=2.0**-8 + 1e-6 * SLACK, atol=2e-6 * SLACK)
    for name, before in (("k", layer.k), ("v", layer.v)):
        after = out[name].view(np.uint16)
        assert same_bits(after[:at], before[:at])
        assert same_bits(after[at + 1 :], before[at + 1 :])
    want = attend(q, out["k"].view(np.uint16), out["v"].view(np.uint16), at)[0]
    got = merged(out["part_o"], out["part_ml"], at // split + 1)
    np.testing.assert_allclose(got, want, rtol=2e-5 * SLACK, atol=1e-5 * SLACK)
    return out


def check_prepared(coalesced: int, order: str) -> None:
    shape, position, split = Shape(6, 2, 64, 16), 300, 128
    layer = layer_of(shape, position)
    q, k, v = prepared(layer)
    q, splits = bf16(q[0]), 4
    layer.k[position], layer.v[position] = bf16(k[0]).view(np.uint16), bf16(v[0]).view(np.uint16)
    args = {
        "step": step(position), "q": q, "k": layer.k.view(ml_dtypes.bfloat16), "v": layer.v.view(ml_dtypes.bfloat16),
        "part_o": np.zeros((splits, 6, 64), np.float32), "part_ml": np.zeros((splits, 6, 2), np.float32),
    }  # fmt: skip
    constants = {**shape.heads, "pack": 2, "fixed": 0, "coalesced": coalesced}
    out = run(
        "attn_decode_prepared", args, {"split": split}, constants, grid=(splits, 2), threads=(128,), order=order,
        checked=True,
    )  # fmt: skip
    want = attend(q.astype(np.float64)[None], layer.k, layer.v, position)[0]
    np.testing.assert_allclose(merged(out["part_o"], out["part_ml"], 3), want, rtol=2e-5 * SLACK, atol=1e-5 * SLACK)
    assert np.isnan(out["part_o"][3:]).all()


def check_combine(dim: int, threads: int, order: str) -> None:
    r = np.random.default_rng(dim)
    hq, split = 3, 64
    for splits in (1, 2, 17, 40):
        part_o = r.normal(size=(splits + 1, hq, dim)).astype(np.float32)
        part_ml = np.abs(r.normal(3, 20, (splits + 1, hq, 2))).astype(np.float32)
        part_o[splits], part_ml[splits] = np.nan, np.nan
        args = {
            "step": step(splits * split - 1), "part_o": part_o, "part_ml": part_ml, "o": bf16(np.zeros((hq, dim)))
        }  # fmt: skip
        constants = {"hq": hq, "dim": dim}
        out = run(
            "attn_combine", args, {"split": split}, constants, grid=(hq,), threads=(threads,), order=order, checked=True
        )  # fmt: skip
        want = merged(part_o, part_ml, splits)
        np.testing.assert_allclose(out["o"].astype(np.float64), want, rtol=2.0**-8, atol=1e-5)
