# SPDX-License-Identifier: Apache-2.0
"""Runs the Gated DeltaNet shaders, and holds them to the float64 formulas of gdn.py.

test_shaders_gdn.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gdn import EPS, Layer, Result, Shape, reference
from msl_harness import SLACK, Call, Run, bf16, run, run_many, step

Array = Any
REAL = Shape()
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


def conv_call(layer: Layer, *, parts: int = 0, spare: int = 0, simdgroups: int = 0) -> Call:
    """``spare`` rows beyond Step.rows; ``parts`` of the rows in the grid, as many as rows if 0."""
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


def gate_call(layer: Layer, o: Array, rows: int, threads: int) -> Call:
    s = layer.shape
    y = bf16(np.zeros((len(o), s.hv * s.dv)))
    proj = np.concatenate([layer.proj, np.zeros((len(o) - len(layer.proj), s.pitch))])
    args = {"step": step(0, rows), "o": o, "proj": bf16(proj), "norm": layer.norm, "y": y}
    return Call("gdn_gate", args, {"pitch": s.pitch, "eps": EPS}, s.heads, (len(o),), (threads,))


def check_gated_norm(shape: Shape, order: str) -> None:
    layer = layer_of(shape, 2)
    o = bf16(np.random.default_rng(4).normal(0, 2, (3, shape.hv, shape.dv)))
    y = run_many([gate_call(layer, o, 2, 96)], order=order, checked=True)[0]["y"]
    x = o[:2].astype(np.float64)
    z = layer.proj[:, shape.channels : shape.channels + shape.hv * shape.dv].astype(np.float64)
    n = (x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * layer.norm).reshape(2, -1)
    close(y[:2], z / (1 + np.exp(-z)) * n)
    assert np.isnan(y[2].astype(np.float32)).all()
