# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against float64 formulas, and decode against prefill bit by bit.

Formulas: the kernel table's.  Not handled: the output gate of decode, which belongs to
the projection that follows (test_cpu_matmul).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from attention import EPS, Layer, Shape, attend, prepared
from kernel_harness import Array, fill, from_bf16, isa_paths, open_device, run, same_bits, step, to_bf16

from lily.device.device import Device

REAL = Shape()
# Head ratios 3, 1, 5 and 12; head dims that leave part of a register tile; one rotary pair.
SHAPES = [REAL, Shape(6, 2, 64, 16), Shape(2, 2, 128, 128), Shape(5, 1, 48, 10), Shape(24, 2, 16, 2)]


# ---- kernels as functions -------------------------------------------------------------------------------------------


def prep(device: Device, layer: Layer, rows: slice, k: Array, v: Array) -> dict[str, Array]:
    s, proj = layer.shape, layer.proj[rows]
    args = {
        "step": step(layer.position + rows.start, len(proj)), "proj": proj, "q_norm": layer.q_norm,
        "k_norm": layer.k_norm, "inv_freq": layer.inv_freq, "q": fill((len(proj), s.hq, s.dim)), "k": k, "v": v,
    }  # fmt: skip
    return run(device, "attn_prep", args, {"pitch": s.pitch, "eps": EPS}, {**s.heads, "rot": s.rot}, (len(proj),))


def prefill(
    device: Device, layer: Layer, rows: slice, k: Array, v: Array, split: int = 256, tile: int = 8
) -> dict[str, Array]:
    """o, k, v, q after attn_prep and attn_prefill."""
    s, proj = layer.shape, layer.proj[rows]
    m = len(proj)
    made = prep(device, layer, rows, k, v)
    args = {
        "step": step(layer.position + rows.start, m), "q": made["q"], "proj": proj, "k": made["k"], "v": made["v"],
        "o": fill((m, s.hq, s.dim)),
    }  # fmt: skip
    params = {"pitch": s.pitch, "split": split, "tile_m": tile}
    return {**made, **run(device, "attn_prefill", args, params, s.heads, (-(-m // tile), s.hkv))}


def combine(device: Device, shape: Shape, position: int, out: dict[str, Array], split: int) -> Array:
    args = {
        "step": step(position), "part_o": out["part_o"], "part_ml": out["part_ml"], "o": fill((shape.hq, shape.dim))
    }  # fmt: skip
    return run(device, "attn_combine", args, {"split": split}, {"hq": shape.hq, "dim": shape.dim}, (shape.hq,))["o"]


def parts(shape: Shape, splits: int) -> dict[str, Array]:
    return {"part_o": fill((splits, shape.hq, shape.dim)), "part_ml": fill((splits, shape.hq, 2))}


def decode(device: Device, layer: Layer, row: int, k: Array, v: Array, split: int = 256) -> dict[str, Array]:
    s, at = layer.shape, layer.position + row
    splits = -(-len(k) // split) + 1
    args = {
        "step": step(at), "proj": layer.proj[row], "q_norm": layer.q_norm, "k_norm": layer.k_norm,
        "inv_freq": layer.inv_freq, "k": k, "v": v, **parts(s, splits),
    }  # fmt: skip
    out = run(
        device, "attn_decode", args, {"pitch": s.pitch, "eps": EPS, "split": split},
        {**s.heads, "rot": s.rot, "pack": min(8, s.rep), "fixed": 0}, (splits, s.hkv),
    )  # fmt: skip
    used = at // split + 1
    assert np.isfinite(out["part_o"][:used]).all()
    assert np.isnan(out["part_o"][used:]).all(), "a split beyond the position was written"
    return {**out, "o": combine(device, s, at, out, split)}


def sequence(
    device: Device, layer: Layer, chunks: Sequence[int], split: int = 256, tile: int = 8
) -> tuple[Array, Array, Array]:
    """o, k, v after chunks of the given sizes; size 0 stands for one decode step."""
    k, v, row, os = layer.k, layer.v, 0, []
    for size in chunks:
        if size == 0:
            out = decode(device, layer, row, k, v, split)
            os.append(out["o"][None])
        else:
            out = prefill(device, layer, slice(row, row + size), k, v, split, tile)
            os.append(out["o"])
        k, v, row = out["k"], out["v"], row + max(size, 1)
    assert row == layer.rows
    return np.concatenate(os), k, v


# ---- values ---------------------------------------------------------------------------------------------------------


# Far positions need a cache as long as that, so a narrow shape stands for them.
PREP = [(s, at) for s in SHAPES for at in (0, 1, 255)] + [(SHAPES[3], at) for at in (32_767, 65_536, 262_140)]


@pytest.mark.parametrize(("shape", "position"), PREP, ids=str)
def test_prep_follows_the_formulas(device: Device, shape: Shape, position: int) -> None:
    layer = Layer(shape, position, 4, plain=True)
    q, k, v = prepared(layer)
    out = prep(device, layer, slice(0, 4), layer.k, layer.v)
    np.testing.assert_allclose(out["q"], q, rtol=2e-6, atol=2e-6)
    at = slice(position, position + 4)
    np.testing.assert_array_equal(out["v"][at], to_bf16(v))
    # Half a unit in the last of bf16's 8 bits; truncation would be off by twice that.
    np.testing.assert_allclose(from_bf16(out["k"][at]), k, rtol=2.0**-8 + 1e-6, atol=2e-6)
    for name, before in (("k", layer.k), ("v", layer.v)):
        assert same_bits(out[name][:position], before[:position])
        assert same_bits(out[name][position + 4 :], before[position + 4 :])


def test_rope_is_exact_at_the_last_position(device: Device) -> None:
    shape = Shape(1, 1, 64, 64)
    layer = Layer(shape, 262_143, 1, plain=True)
    q, _, _ = prepared(layer)
    out = prep(device, layer, slice(0, 1), layer.k, layer.v)
    # Pair 0 turns by 262,143 radians: an argument reduction in float32 would be off by 1e-2.
    np.testing.assert_allclose(out["q"][0], q[0], rtol=1e-6, atol=1e-6)


def test_values_are_rounded_to_the_nearest_even_bf16(device: Device) -> None:
    shape = Shape(1, 1, 16, 2)
    layer = Layer(shape, 0, 1)
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F7FFFFF, 0, 0x80000000], np.uint32)
    layer.proj[0, -16:-8] = bits.view(np.float32)
    out = prep(device, layer, slice(0, 1), layer.k, layer.v)
    want = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x7F80, 0, 0x8000]
    np.testing.assert_array_equal(out["v"][0, 0, :8], want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_follows_the_formulas(device: Device, shape: Shape) -> None:
    for position in (0, 1, 2, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 513):
        layer = Layer(shape, position, 1, seed=position)
        out = decode(device, layer, 0, layer.k, layer.v)
        q, _, _ = prepared(layer)
        want = attend(q, out["k"], out["v"], position)[0]
        np.testing.assert_allclose(out["o"], want, rtol=2e-5, atol=1e-5, err_msg=f"position {position}")


# Every number of rows, and every position at which a split or a block begins or ends.
PREFILL = [(0, 1), (0, 2), (0, 3), (1, 4), (0, 7), (250, 8), (1, 9), (250, 31), (0, 32), (513, 33), (250, 65)]


@pytest.mark.native("slow under emulation")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_follows_the_formulas(device: Device, shape: Shape) -> None:
    for position, rows in PREFILL:
        layer = Layer(shape, position, rows, seed=rows)
        out = prefill(device, layer, slice(0, rows), layer.k, layer.v)
        q, _, _ = prepared(layer)
        want = attend(q, out["k"], out["v"], position) / (1 + np.exp(-layer.gate.astype(float)))
        np.testing.assert_allclose(out["o"], want, rtol=2e-5, atol=1e-5, err_msg=f"{rows} rows at {position}")


def test_great_scores_do_not_overflow(device: Device) -> None:
    layer = Layer(Shape(2, 1, 64, 16), 200, 2)
    layer.q_norm *= 300
    layer.k[:200] = to_bf16(from_bf16(layer.k[:200]) * 10)
    out = prefill(device, layer, slice(0, 2), layer.k, layer.v)
    q, _, _ = prepared(layer)
    want = attend(q, out["k"], out["v"], 200) / (1 + np.exp(-layer.gate.astype(float)))
    # Scores of thousands carry a rounding error of about 1e-3, which the exponential passes on.
    np.testing.assert_allclose(out["o"], want, rtol=1e-2, atol=1e-2)


# ---- the same bits, however the work is cut -------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 61, 254])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_and_prefill_agree_for_every_split(device: Device, shape: Shape, position: int) -> None:
    layer = Layer(shape, position, 6)
    layer.open_gates()
    whole = sequence(device, layer, [6])
    for chunks in ([0] * 6, [1] * 6, [1, 5], [2, 4], [3, 3], [4, 0, 1], [0, 4, 0], [5, 0]):
        for name, a, b in zip("okv", whole, sequence(device, layer, chunks), strict=True):
            assert same_bits(a, b), f"{name} differs for chunks {chunks}"


@pytest.mark.parametrize("split", [64, 100, 256, 1024])
def test_decode_and_prefill_agree_for_every_length_of_a_split(device: Device, split: int) -> None:
    layer = Layer(Shape(6, 2, 64, 16), 297, 5)
    layer.open_gates()
    for a, b in zip(sequence(device, layer, [5], split), sequence(device, layer, [0] * 5, split), strict=True):
        assert same_bits(a, b)


@pytest.mark.native("slow under emulation")
def test_results_do_not_depend_on_the_tile(device: Device) -> None:
    layer = Layer(Shape(6, 2, 64, 16), 120, 70)
    want = sequence(device, layer, [70], tile=8)
    for tile in (1, 3, 16, 64, 128):
        assert same_bits(want[0], sequence(device, layer, [70], tile=tile)[0]), tile


@pytest.mark.native("opens a device of its own")
@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_threads(device: Device, threads: int) -> None:
    layer = Layer(Shape(6, 2, 64, 16), 500, 20)
    other = open_device(device.info["isa"], threads)
    for chunks in ([20], [0] * 20):
        for a, b in zip(sequence(device, layer, chunks), sequence(other, layer, chunks), strict=True):
            assert same_bits(a, b)


def test_a_later_row_with_nan_does_not_reach_an_earlier_one(device: Device) -> None:
    layer = Layer(Shape(5, 1, 48, 10), 62, 4)
    clean = prefill(device, layer, slice(0, 3), layer.k, layer.v)
    layer.proj[3] = np.nan
    spoilt = prefill(device, layer, slice(0, 4), layer.k, layer.v)
    assert same_bits(clean["o"], spoilt["o"][:3])
    assert np.isnan(spoilt["o"][3]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prepared_decode_gives_the_bits_of_the_fused_one(device: Device, shape: Shape) -> None:
    layer = Layer(shape, 300, 1)
    fused = decode(device, layer, 0, layer.k, layer.v)
    made = prep(device, layer, slice(0, 1), layer.k, layer.v)
    args = {"step": step(300), **{n: made[n] for n in "qkv"}, **parts(shape, 3)}
    constants = {**shape.heads, "pack": 1, "fixed": 0, "coalesced": 0}
    out = run(device, "attn_decode_prepared", args, {"split": 256}, constants, (3, shape.hkv))
    for name in ("part_o", "part_ml"):
        assert same_bits(out[name], fused[name])


def test_rows_beyond_the_step_are_left_alone(device: Device) -> None:
    shape = Shape(6, 2, 64, 16)
    layer = Layer(shape, 10, 5)
    made = prep(device, layer, slice(0, 5), layer.k, layer.v)
    args = {
        "step": step(10, 3), "q": made["q"], "proj": layer.proj, "k": made["k"], "v": made["v"],
        "o": fill((5, shape.hq, shape.dim)),
    }  # fmt: skip
    params = {"pitch": shape.pitch, "split": 256, "tile_m": 2}
    out = run(device, "attn_prefill", args, params, shape.heads, (3, shape.hkv))["o"]
    assert np.isfinite(out[:3]).all()
    assert np.isnan(out[3:]).all()


# The last row of the cache ends 256 bytes, which readers of whole vectors may fetch, before memory that is not there.
FENCED = """
import ctypes, mmap, sys
import numpy as np
from lily.device.device import Device
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View
from lily.structs import STEP

kernel, isa, tokens, rows, hq, hkv, dim = KERNELS[sys.argv[1]], sys.argv[2], 40, 3, 4, 2, 256
device, page, pitch = Device("cpu", isa=isa, threads=1), mmap.PAGESIZE, 2 * (hq + hkv) * dim
rows = 1 if kernel.name == "attn_decode" else rows
cache = tokens * hkv * dim * 2
sizes = {"k": cache, "v": cache, "step": STEP.itemsize, "proj": rows * pitch * 4, "q": rows * hq * dim * 4}
sizes |= {"q_norm": dim * 4, "k_norm": dim * 4, "inv_freq": 128, "o": rows * hq * dim * 4}
sizes |= {"part_o": hq * dim * 4, "part_ml": hq * 8}
buffers, views = {}, []
for arg in kernel.args:
    size, at = sizes[arg.name], 0
    buffer = buffers[arg.name] = device.buffer(size + 4 * page)
    if arg.name in "kv":
        fence = -(-(buffer.address + size + 256) // page) * page
        at = fence - 256 - size - buffer.address
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    views.append(View(arg.name, at, size))
buffers["step"].array(STEP)[0] = (tokens - rows, rows, 0, 0)
values = {"pitch": pitch, "eps": 1e-6, "split": 64, "tile_m": 2}
heads = {"hq": hq, "hkv": hkv, "dim": dim, "rot": 64, "pack": 2, "fixed": 0}
params, constants = tuple(values[n] for n, _ in kernel.params), tuple(heads[n] for n in kernel.constants)
grid = (1 if kernel.name == "attn_decode" else 2, hkv, 1)
plan = Plan("fenced", (Dispatch(kernel, "", constants, tuple(views), params, grid, (1, 1, 1)),), 0)
device.wait(device.submit([device.record(plan, buffers)]))
print("ran")
"""


@pytest.mark.parametrize("isa", isa_paths())
@pytest.mark.parametrize("kernel", ["attn_decode", "attn_prefill"])
def test_the_cache_is_not_read_beyond_its_last_row(kernel: str, isa: str) -> None:
    done = subprocess.run([sys.executable, "-c", FENCED, kernel, isa], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
