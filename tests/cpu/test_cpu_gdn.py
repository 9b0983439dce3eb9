# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet kernels against float64 formulas, and decode against prefill bit by bit.

Formulas: the kernel table's.  Not handled: the projections around the layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from gdn import EPS, Layer, Shape, reference, scan_512
from kernel_harness import Array, fill, from_bf16, open_device, run, same_bits, step, to_bf16

from lily.device.device import Device

REAL = Shape()
# Three value heads a key head, Dk < Dv (as in random-tiny's sibling); a width that fills no vector panel; one head.
SHAPES = [REAL, Shape(2, 6, 32, 64), Shape(1, 5, 16, 48), Shape(1, 1, 256, 16), Shape(1, 2, 64, 256)]


# ---- kernels as functions -------------------------------------------------------------------------------------------


def decode(device: Device, layer: Layer, row: int, conv: Array, state: Array) -> dict[str, Array]:
    s = layer.shape
    args = {
        "proj": layer.proj[row], "conv_w": layer.conv_w, "a_log": layer.a_log, "dt_bias": layer.dt_bias,
        "norm": layer.norm, "conv_in": conv, "conv_out": fill(conv.shape), "s_in": state, "s_out": fill(state.shape),
        "y": fill(s.hv * s.dv),
    }  # fmt: skip
    return run(device, "gdn_step", args, {"pitch": s.pitch, "eps": EPS}, {**s.heads, "taps": s.taps}, (s.hv,))


def convolve(
    device: Device, layer: Layer, rows: slice, conv: Array, grid_rows: int | None = None, parts: int | None = None
) -> dict[str, Array]:
    s, proj = layer.shape, layer.proj[rows]
    m = grid_rows or len(proj)
    padded = np.concatenate([proj, np.full((m - len(proj), s.pitch), np.nan, np.float32)])
    args = {
        "step": step(0, len(proj)), "proj": padded, "conv_w": layer.conv_w, "a_log": layer.a_log,
        "dt_bias": layer.dt_bias, "conv_in": conv, "conv_out": fill(conv.shape), "q": fill((m, s.hk, s.dk)),
        "k": fill((m, s.hk, s.dk)), "v": fill((m, s.hv, s.dv)), "gate": fill((m, s.hv)), "beta": fill((m, s.hv)),
    }  # fmt: skip
    return run(device, "gdn_conv", args, {"pitch": s.pitch}, {**s.heads, "taps": s.taps}, (s.hk, parts or m))


def scan(
    device: Device, shape: Shape, parts: dict[str, Array], state: Array, rows: int, name: str = "gdn_scan"
) -> dict[str, Array]:
    args = {
        "step": step(0, rows), **{name: parts[name] for name in ("q", "k", "v", "gate", "beta")}, "s_in": state,
        "s_out": fill(state.shape), "o": fill(parts["v"].shape),
    }  # fmt: skip
    return run(device, name, args, {}, shape.heads, (shape.hv,))


def prefill(device: Device, layer: Layer, rows: slice, conv: Array, state: Array) -> dict[str, Array]:
    s, proj = layer.shape, layer.proj[rows]
    m = len(proj)
    parts = convolve(device, layer, rows, conv)
    out = scan(device, s, parts, state, m)
    args = {"step": step(0, m), "o": out["o"], "proj": proj, "norm": layer.norm, "y": fill((m, s.hv * s.dv))}
    y = run(device, "gdn_gate", args, {"pitch": s.pitch, "eps": EPS}, s.heads, (m,))["y"]
    return {**parts, "s_out": out["s_out"], "o": out["o"], "y": y}


def sequence(device: Device, layer: Layer, chunks: Iterable[int]) -> tuple[Array, Array, Array]:
    """y, conv state and state after chunks of the given sizes; size 0 stands for one decode step."""
    conv, state, row, ys = layer.conv, layer.state, 0, []
    for size in chunks:
        if size == 0:
            out = decode(device, layer, row, conv, state)
            ys.append(out["y"][None])
        else:
            out = prefill(device, layer, slice(row, row + size), conv, state)
            ys.append(out["y"])
        conv, state, row = out["conv_out"], out["s_out"], row + max(size, 1)
    assert row == len(layer.proj)
    return np.concatenate(ys), conv, state


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_step_follows_the_formulas(device: Device, shape: Shape) -> None:
    layer = Layer.random(shape, 1)
    want, out = reference(layer), decode(device, layer, 0, layer.conv, layer.state)
    np.testing.assert_allclose(out["y"], want.y[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out["s_out"], want.state, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(out["conv_out"], want.conv)


@pytest.mark.native("slow under emulation")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 65])
def test_prefill_follows_the_formulas(device: Device, rows: int) -> None:
    for shape in SHAPES:
        check_prefill(device, shape, rows)


def check_prefill(device: Device, shape: Shape, rows: int) -> None:
    layer = Layer.random(shape, rows, seed=rows)
    want, out = reference(layer), prefill(device, layer, slice(0, rows), layer.conv, layer.state)
    for name in ("q", "k", "v", "gate", "beta"):
        np.testing.assert_allclose(out[name], getattr(want, name), rtol=4e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(out["o"], want.o, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(out["s_out"], want.state, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(out["y"], want.y, rtol=5e-5, atol=5e-5)
    np.testing.assert_array_equal(out["conv_out"], want.conv)


@pytest.mark.parametrize("taps", range(2, 9))
def test_every_number_of_taps_and_fewer_rows_than_taps(device: Device, taps: int) -> None:
    shape = Shape(2, 4, 16, 32, taps)
    for rows in (1, 2, 3, taps, 10):
        layer = Layer.random(shape, rows)
        want, out = reference(layer), prefill(device, layer, slice(0, rows), layer.conv, layer.state)
        np.testing.assert_allclose(out["v"], want.v, rtol=4e-6, atol=1e-6)
        np.testing.assert_array_equal(out["conv_out"], want.conv)
    want, out = reference(layer), sequence(device, layer, [0] * 10)
    np.testing.assert_allclose(out[0], want.y, rtol=5e-5, atol=5e-5)
    np.testing.assert_array_equal(out[1], want.conv)


@pytest.mark.parametrize("parts", [1, 2, 3, 6, 9, 12])
def test_parts_of_the_rows_convolve_as_single_rows_do(device: Device, parts: int) -> None:
    """Shares of 9 rows that are uneven, single, or empty; the last row alone leaves the state."""
    layer = Layer.random(Shape(2, 4, 16, 32), 9)
    single = convolve(device, layer, slice(0, 9), layer.conv)
    shared = convolve(device, layer, slice(0, 9), layer.conv, parts=parts)
    assert all(same_bits(shared[name], single[name]) for name in single)


def test_gates_over_their_whole_range(device: Device) -> None:
    shape = Shape(1, 61, 16, 16)
    layer = Layer.random(shape, 3)
    a = np.linspace(-30, 30, 61, dtype=np.float32)
    layer.dt_bias[:] = 0
    layer.a_log[:] = np.linspace(-6, 3, 61)
    layer.proj[0, -61:], layer.proj[1, -61:], layer.proj[2, -61:] = a, a[::-1], 0
    layer.proj[0, -122:-61], layer.proj[1, -122:-61] = a, 3 * a
    want, out = reference(layer), convolve(device, layer, slice(0, 3), layer.conv)
    # g = exp(-x): an error of one part in 2^22 of the exponent x, and rounding.
    exponent = -np.log(np.maximum(want.gate, 1e-300))
    assert (np.abs(out["gate"] - want.gate) <= want.gate * (3e-7 + 5e-7 * exponent) + 1.2e-38).all()
    np.testing.assert_allclose(out["beta"], want.beta, rtol=4e-7, atol=1.2e-38)
    assert (out["gate"] <= 1).all()
    assert (out["gate"] >= 0).all()


def test_512_steps_keep_float32_accuracy(device: Device) -> None:
    layer, want = scan_512()
    out = prefill(device, layer, slice(0, 512), layer.conv, layer.state)
    scale = np.sqrt((want.o**2).mean())
    assert np.abs(out["o"] - want.o).max() < 2e-5 * scale
    assert np.abs(out["s_out"] - want.state).max() < 2e-5 * np.abs(want.state).max()


def test_the_512_step_bound_excludes_a_bf16_state() -> None:
    layer, want = scan_512()
    state, o = layer.state.astype(np.float32), np.empty_like(want.o)
    for t in range(512):
        kt, qt = np.repeat(want.k[t], 2, 0), np.repeat(want.q[t], 2, 0)
        state = state * want.gate[t][:, None, None]
        d = want.beta[t][:, None] * (want.v[t] - np.einsum("hkv,hk->hv", state, kt))
        state = from_bf16(to_bf16(state + kt[:, :, None] * d[:, None, :]))
        o[t] = np.einsum("hkv,hk->hv", state, qt)
    assert np.abs(o - want.o).max() > 100 * 2e-5 * np.sqrt((want.o**2).mean())


# ---- the same bits, however the work is cut -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_and_prefill_agree_for_every_split(device: Device, shape: Shape) -> None:
    layer = Layer.random(shape, 7)
    whole = sequence(device, layer, [7])
    for chunks in ([0] * 7, [1] * 7, [1, 6], [2, 5], [3, 4], [4, 0, 2], [0, 5, 0], [6, 0], [2, 0, 0, 3]):
        for name, a, b in zip(("y", "conv", "state"), whole, sequence(device, layer, chunks), strict=True):
            assert same_bits(a, b), f"{name} differs for chunks {chunks}"


@pytest.mark.native("opens a device of its own")
@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_threads(device: Device, threads: int) -> None:
    layer = Layer.random(Shape(2, 6, 32, 64), 9)
    other = open_device(device.info["isa"], threads)
    for chunks in ([9], [0] * 9):
        for a, b in zip(sequence(device, layer, chunks), sequence(other, layer, chunks), strict=True):
            assert same_bits(a, b)


def test_blocked_scan_gives_the_result_of_the_scan(device: Device) -> None:
    layer = Layer.random(REAL, 5)
    parts = convolve(device, layer, slice(0, 5), layer.conv)
    a = scan(device, REAL, parts, layer.state, 5)
    b = scan(device, REAL, parts, layer.state, 5, "gdn_scan_blocked")
    np.testing.assert_allclose(a["o"], b["o"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a["s_out"], b["s_out"], rtol=1e-5, atol=1e-6)


def test_rows_beyond_the_step_are_left_alone(device: Device) -> None:
    layer = Layer.random(REAL, 3)
    exact, padded = (
        convolve(device, layer, slice(0, 3), layer.conv),
        convolve(device, layer, slice(0, 3), layer.conv, 8),
    )
    for name in ("q", "k", "v", "gate", "beta"):
        assert same_bits(exact[name], padded[name][:3])
        assert np.isnan(padded[name][3:]).all()
    assert same_bits(exact["conv_out"], padded["conv_out"])
    out = scan(device, REAL, padded, layer.state, 3)
    assert same_bits(out["s_out"], scan(device, REAL, exact, layer.state, 3)["s_out"])
    assert np.isnan(out["o"][3:]).all()


def test_scan_may_run_in_place(device: Device) -> None:
    layer = Layer.random(REAL, 4)
    parts = convolve(device, layer, slice(0, 4), layer.conv)
    want = scan(device, REAL, parts, layer.state, 4)
    state = layer.state.copy()
    args = {"step": step(0, 4), **{n: parts[n] for n in ("q", "k", "v", "gate", "beta")}, "s_in": state, "s_out": state}
    got = run(device, "gdn_scan", {**args, "o": fill(parts["v"].shape)}, {}, REAL.heads, (REAL.hv,))
    assert same_bits(got["s_out"], want["s_out"])
    assert same_bits(got["o"], want["o"])
