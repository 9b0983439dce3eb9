# SPDX-License-Identifier: Apache-2.0
"""Metal kernels of Gated DeltaNet, emulated, against the float64 formulas of test_cpu_gdn.

Inputs are numbers that bf16 can hold, so that a kernel and the reference see the same ones.
Not handled: the projections around the layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import same_bits
from msl_harness import ORDERS, SLACK, Call, Run, bf16, needs_shaders, run, run_many, step
from test_cpu_gdn import EPS, Layer, Result, Shape, reference, scan_512

Array = Any
pytestmark = needs_shaders
REAL = Shape()
SHAPES = [REAL, Shape(2, 6, 32, 64), Shape(1, 2, 16, 48), Shape(1, 2, 256, 16), Shape(1, 2, 64, 256)]
HALF_ULP = 2.0**-8  # of a bf16 number, relative


def rounded(x: Array) -> Array:
    return bf16(x).astype(np.float32)


def layer_of(shape: Shape, rows: int, seed: int = 0) -> Layer:
    layer = Layer.random(shape, rows, seed)
    layer.proj, layer.conv = rounded(layer.proj), rounded(layer.conv)
    return layer


def close(got: Array, want: Array, atol: float = 1e-5) -> None:
    relative = 2e-5 * SLACK if got.dtype == np.float32 else HALF_ULP
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=relative, atol=atol * SLACK)


# ---- one token ------------------------------------------------------------------------------------------------------


def step_threads(s: Shape) -> int:
    """32 rows by 32 columns of the state a simdgroup."""
    return 32 * -(-s.dk // 32) * -(-s.dv // 32)


def decode(layer: Layer, row: int, conv: Array, state: Array, **options: Any) -> Run:
    s = layer.shape
    args = {
        "proj": bf16(layer.proj[row]), "conv_w": layer.conv_w, "a_log": layer.a_log, "dt_bias": layer.dt_bias,
        "norm": layer.norm, "conv_in": bf16(conv), "conv_out": bf16(conv), "s_in": state, "s_out": np.zeros_like(state),
        "y": bf16(np.zeros(s.hv * s.dv)),
    }  # fmt: skip
    return run(
        "gdn_step", args, {"pitch": s.pitch, "eps": EPS}, {**s.heads, "taps": s.taps}, grid=(s.hv,),
        threads=(step_threads(s),), **options,
    )  # fmt: skip


def check_step(layer: Layer, **options: Any) -> Run:
    want, out = reference(layer), decode(layer, 0, layer.conv, layer.state, **options)
    np.testing.assert_allclose(out["s_out"], want.state, rtol=2e-6 * SLACK, atol=2e-6 * SLACK)
    np.testing.assert_array_equal(out["conv_out"].astype(np.float64), want.conv)
    close(out["y"], want.y[0], atol=2e-5)
    return out


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


def conv_call(layer: Layer, *, parts: int = 0, spare: int = 0, simdgroups: int = 0) -> Call:
    """`spare` rows beyond Step.rows; `parts` of the rows in the grid, as many as rows if 0."""
    s, rows = layer.shape, len(layer.proj)
    m = rows + spare
    padded = np.concatenate([layer.proj, np.full((spare, s.pitch), np.nan, np.float32)])
    args = {
        "step": step(0, rows), "proj": bf16(padded), "conv_w": layer.conv_w, "a_log": layer.a_log,
        "dt_bias": layer.dt_bias, "conv_in": bf16(layer.conv), "conv_out": bf16(layer.conv),
        "q": bf16(np.zeros((m, s.hk, s.dk))), "k": bf16(np.zeros((m, s.hk, s.dk))),
        "v": bf16(np.zeros((m, s.hv, s.dv))), "gate": np.zeros((m, s.hv), np.float32),
        "beta": np.zeros((m, s.hv), np.float32),
    }  # fmt: skip
    threads = 32 * (simdgroups or 2 + s.rep)
    return Call("gdn_conv", args, {"pitch": s.pitch}, {**s.heads, "taps": s.taps}, (s.hk, parts or m), (threads,))


def convolve(layer: Layer, parts: int = 0, spare: int = 0, simdgroups: int = 0, **options: Any) -> Run:
    return run_many([conv_call(layer, parts=parts, spare=spare, simdgroups=simdgroups)], **options)[0]


def check_conv(layer: Layer, **options: Any) -> None:
    want, out, rows = reference(layer), convolve(layer, **options), len(layer.proj)
    for name in ("q", "k", "v"):
        close(out[name][:rows], getattr(want, name), atol=2e-6)
        assert np.isnan(out[name][rows:].astype(np.float32)).all()
    for name in ("gate", "beta"):
        np.testing.assert_allclose(out[name][:rows], getattr(want, name), rtol=4e-6 * SLACK)
        assert np.isnan(out[name][rows:]).all()
    np.testing.assert_array_equal(out["conv_out"].astype(np.float64), want.conv)


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


def scan_call(
    name: str, shape: Shape, parts: Any, state: Array, rows: int, grid: tuple[int, ...], threads: int
) -> Call:
    args = {
        "step": step(0, rows), **{n: parts[n] for n in ("q", "k", "v", "gate", "beta")}, "s_in": state,
        "s_out": np.zeros_like(state), "o": bf16(np.zeros(parts["v"].shape)),
    }  # fmt: skip
    return Call(name, args, {}, shape.heads, grid, (threads,))


def inputs(want: Result) -> dict[str, Array]:
    """What gdn_conv hands over, from the reference."""
    act = {n: bf16(getattr(want, n)) for n in "qkv"}
    return {**act, "gate": want.gate.astype(np.float32), "beta": want.beta.astype(np.float32)}


def recurrence(shape: Shape, parts: dict[str, Array], state: Array) -> tuple[Array, Array]:
    """(o, state) in float64 of the rounded inputs."""
    q, k, v, gate, beta = (parts[n].astype(np.float64) for n in ("q", "k", "v", "gate", "beta"))
    s, o = state.astype(np.float64), np.empty(v.shape)
    for t in range(len(v)):
        kt, qt = np.repeat(k[t], shape.rep, 0), np.repeat(q[t], shape.rep, 0)
        s = s * gate[t][:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, kt))
        s = s + kt[:, :, None] * d[:, None, :]
        o[t] = np.einsum("hkv,hk->hv", s, qt)
    return o, s


def check_scan(
    layer: Layer, parts: int = 1, threads: int = 128, spare: int = 0, name: str = "gdn_scan", **options: Any
) -> Run:
    shape, rows, made = layer.shape, len(layer.proj), inputs(reference(layer))
    want_o, want_s = recurrence(shape, made, layer.state)
    padded = {n: np.concatenate([a, np.full((spare, *a.shape[1:]), np.nan, a.dtype)]) for n, a in made.items()}
    out = run_many([scan_call(name, shape, padded, layer.state, rows, (shape.hv, parts), threads)], **options)[0]
    close(out["o"][:rows], want_o, atol=2e-5)
    assert np.isnan(out["o"][rows:].astype(np.float32)).all()
    np.testing.assert_allclose(out["s_out"], want_s, rtol=2e-5 * SLACK, atol=3e-6 * SLACK)
    return out


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


def gate_call(layer: Layer, o: Array, rows: int, threads: int) -> Call:
    s = layer.shape
    y = bf16(np.zeros((len(o), s.hv * s.dv)))
    proj = np.concatenate([layer.proj, np.zeros((len(o) - len(layer.proj), s.pitch))])
    args = {"step": step(0, rows), "o": o, "proj": bf16(proj), "norm": layer.norm, "y": y}
    return Call("gdn_gate", args, {"pitch": s.pitch, "eps": EPS}, s.heads, (len(o),), (threads,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gated_norm_follows_the_formula(shape: Shape, order: str) -> None:
    layer = layer_of(shape, 2)
    o = bf16(np.random.default_rng(4).normal(0, 2, (3, shape.hv, shape.dv)))
    y = run_many([gate_call(layer, o, 2, 96)], order=order, checked=True)[0]["y"]
    x = o[:2].astype(np.float64)
    z = layer.proj[:, shape.channels : shape.channels + shape.hv * shape.dv].astype(np.float64)
    n = (x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * layer.norm).reshape(2, -1)
    close(y[:2], z / (1 + np.exp(-z)) * n)
    assert np.isnan(y[2].astype(np.float32)).all()


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
