# SPDX-License-Identifier: Apache-2.0
"""Metal kernels of Gated DeltaNet, emulated, against the float64 formulas of test_cpu_gdn.

Inputs are numbers that bf16 can hold, so that a kernel and the reference see the same ones.
Not handled: the projections around the layer.
"""

from __future__ import annotations

import numpy as np
import pytest
from gdn import Shape, reference, scan_512
from kernel_harness import same_bits
from msl_harness import ORDERS, SLACK, needs_shaders, run, run_many
from shader_gdn import (
    REAL,
    check_conv,
    check_gated_norm,
    check_scan,
    check_step,
    close,
    conv_call,
    convolve,
    decode,
    gate_call,
    inputs,
    layer_of,
    recurrence,
    rounded,
    scan_call,
)

pytestmark = needs_shaders
SHAPES = [REAL, Shape(2, 6, 32, 64), Shape(1, 2, 16, 48), Shape(1, 2, 256, 16), Shape(1, 2, 64, 256)]


# ---- one token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_step_follows_the_formulas(shape: Shape) -> None:
    check_step(layer_of(shape, 1))


@pytest.mark.parametrize("taps", [2, 3, 8])
def test_decode_step_with_any_number_of_taps(taps: int) -> None:
    check_step(layer_of(Shape(2, 4, 16, 32, taps), 1))


@pytest.mark.parametrize("order", ORDERS)
def test_decode_step_checked_in_every_lane_order(order: str) -> None:
    check_step(layer_of(Shape(1, 2), 1), order=order, checked=True)
    check_step(layer_of(Shape(2, 6, 32, 64), 1), order=order, checked=True)


def test_decode_step_moves_the_state_once() -> None:
    """Every element of S is read once and written once, and everything else is small."""
    s = Shape(1, 2)
    out = decode(layer := layer_of(s, 1), 0, layer.conv, layer.state, checked=True)
    state = s.hv * s.dk * s.dv * 4
    rest = 2 * s.pitch + s.channels * (4 * 4 + 2 * 3) + 4 * (s.dv + 2 * s.hv) + 8
    assert out.distinct_read <= state + rest
    assert out.distinct_written == state + s.channels * 3 * 2 + s.hv * s.dv * 2
    # The second value head reads its key head's channels again; nothing else is read twice across groups.
    assert out.bytes_read <= 1.2 * out.distinct_read
    assert out.bytes_written == out.distinct_written


def test_conv_state_of_a_key_head_is_written_once() -> None:
    s = Shape(1, 3, 16, 32)
    out = decode(layer := layer_of(s, 1), 0, layer.conv, layer.state, checked=True)
    assert out.bytes_written == out.distinct_written


def test_decode_steps_follow_each_other() -> None:
    layer = layer_of(Shape(1, 2, 64, 32), 12)
    want, conv, state = reference(layer), layer.conv, layer.state
    for t in range(12):
        out = decode(layer, t, conv, state)
        close(out["y"], want.y[t], atol=3e-5)
        conv, state = out["conv_out"], out["s_out"]
    close(state, want.state)
    np.testing.assert_array_equal(conv.astype(np.float64), want.conv)


def test_gates_over_their_whole_range() -> None:
    shape = Shape(1, 62, 16, 16)
    layer = layer_of(shape, 3)
    a = rounded(np.linspace(-30, 30, 62))
    layer.dt_bias[:] = 0
    layer.a_log[:] = np.linspace(-6, 3, 62)
    layer.proj[0, -62:], layer.proj[1, -62:], layer.proj[2, -62:] = a, a[::-1], 0
    layer.proj[0, -124:-62], layer.proj[1, -124:-62] = a, rounded(3 * a)
    want, out = reference(layer), convolve(layer, simdgroups=4)
    # g = exp(-x): an error of one part in 2^22 of the exponent x, and rounding.
    exponent = -np.log(np.maximum(want.gate, 1e-300))
    assert (np.abs(out["gate"] - want.gate) <= want.gate * (3e-7 + 5e-7 * exponent) * SLACK + 1.2e-38).all()
    np.testing.assert_allclose(out["beta"], want.beta, rtol=4e-7 * SLACK, atol=1.2e-38)


# ---- many tokens: convolution and gates -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_conv_follows_the_formulas(shape: Shape) -> None:
    for rows, parts in ((1, 1), (2, 1), (3, 2), (9, 2), (33, 4)):
        check_conv(layer_of(shape, rows, seed=rows), parts=parts)


@pytest.mark.parametrize("taps", [2, 3, 8])
def test_conv_of_fewer_rows_than_taps(taps: int) -> None:
    for rows in (1, taps - 1, taps, 10):
        check_conv(layer_of(Shape(1, 2, 16, 32, taps), rows), parts=2)


def test_conv_however_the_rows_are_divided() -> None:
    layer = layer_of(Shape(2, 4, 32, 64), 20)
    for parts, spare, simdgroups in ((1, 0, 1), (3, 0, 2), (20, 12, 4), (32, 5, 3)):
        check_conv(layer, parts=parts, spare=spare, simdgroups=simdgroups)


@pytest.mark.parametrize("order", ORDERS)
def test_conv_checked_in_every_lane_order(order: str) -> None:
    check_conv(layer_of(Shape(1, 2), 7), parts=2, spare=1, order=order, checked=True)


# ---- many tokens: recurrence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_follows_the_formulas(shape: Shape) -> None:
    for rows in (1, 2, 9, 33):
        check_scan(layer_of(shape, rows, seed=rows))


@pytest.mark.parametrize(("parts", "threads"), [(1, 32), (1, 256), (8, 128), (32, 128), (128, 32), (5, 64)])
def test_scan_packs_columns_or_gives_each_a_simdgroup(parts: int, threads: int) -> None:
    """128 simdgroups a head take one column each; fewer take columns in packs, in turn if there are too few."""
    check_scan(layer_of(Shape(1, 2), 3), parts=parts, threads=threads, spare=2)


def test_scan_of_256_key_dims_with_a_simdgroup_a_column() -> None:
    check_scan(layer_of(Shape(1, 2, 256, 16), 3), parts=4, threads=128)


@pytest.mark.parametrize("order", ORDERS)
def test_scan_checked_in_every_lane_order(order: str) -> None:
    check_scan(layer_of(Shape(1, 2), 3), parts=2, threads=64, order=order, checked=True)
    check_scan(layer_of(Shape(1, 1, 128, 16), 3), parts=4, threads=128, order=order, checked=True)
    check_scan(layer_of(Shape(1, 2, 16, 48), 4), order=order, checked=True)


def test_scan_reads_and_writes_the_state_once() -> None:
    s = Shape(1, 2)
    out = check_scan(layer_of(s, 9), parts=8, threads=128, checked=True)
    state, tokens = s.hv * s.dk * s.dv * 4, 9 * (2 * (2 * s.dk + s.hv * s.dv) + 8 * s.hv)
    assert state + tokens <= out.distinct_read <= state + tokens + 16
    assert out.bytes_written == out.distinct_written == state + 9 * s.hv * s.dv * 2


def test_scan_may_run_in_place() -> None:
    layer = layer_of(Shape(1, 2, 64, 32), 4)
    want = check_scan(layer)
    call = scan_call("gdn_scan", layer.shape, inputs(reference(layer)), layer.state.copy(), 4, (2, 1), 128)
    arrays = dict(call.arrays)
    arrays["s_out"] = arrays["s_in"]
    got = run("gdn_scan", arrays, {}, layer.shape.heads, grid=(2, 1), threads=(128,))
    assert same_bits(got["s_out"], want["s_out"])
    assert same_bits(got["o"], want["o"])


def test_512_steps_keep_float32_accuracy() -> None:
    layer, _ = scan_512()
    layer.proj, layer.conv = rounded(layer.proj), rounded(layer.conv)
    made = inputs(reference(layer))
    want_o, want_s = recurrence(layer.shape, made, layer.state)
    call = scan_call("gdn_scan", layer.shape, made, layer.state, 512, (2, 4), 128)
    out = run_many([call])[0]
    assert np.abs(out["s_out"] - want_s).max() < 2e-5 * SLACK * np.abs(want_s).max()
    close(out["o"], want_o, atol=2e-5 * np.sqrt((want_o**2).mean()))


@pytest.mark.parametrize("order", ORDERS)
def test_blocked_scan_follows_the_formulas(order: str) -> None:
    for rows in (1, 8, 19):
        check_scan(
            layer_of(Shape(1, 2, 32, 48), rows), spare=1, threads=64, name="gdn_scan_blocked", order=order, checked=True
        )


# ---- gated norm, and the phases together ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gated_norm_follows_the_formula(shape: Shape, order: str) -> None:
    check_gated_norm(shape, order)


def test_decode_agrees_with_prefill() -> None:
    """The same tokens one by one and as a chunk, up to the bf16 values that only prefill hands over."""
    layer = layer_of(Shape(1, 2, 128, 32), 6)
    conv, state, ys = layer.conv, layer.state, []
    for t in range(6):
        out = decode(layer, t, conv, state)
        conv, state = out["conv_out"], out["s_out"]
        ys.append(out["y"].astype(np.float64))
    first = conv_call(layer, parts=2)
    s = layer.shape
    scan = scan_call("gdn_scan", s, first.arrays, layer.state, 6, (s.hv, 1), 128)
    results = run_many([first, scan, gate_call(layer, scan.arrays["o"], 6, 64)])
    np.testing.assert_array_equal(results[0]["conv_out"].astype(np.float64), conv.astype(np.float64))
    np.testing.assert_allclose(results[1]["s_out"], state, rtol=0.03, atol=0.01)
    np.testing.assert_allclose(results[2]["y"].astype(np.float64), ys, rtol=0.05, atol=0.05)
