# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts kernels of the CPU device against float64, and decode against prefill bit by bit.

Not handled: the routing kernels by themselves (test_cpu_route.py), dense products (test_cpu_matmul.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import Call, run_calls
from kernel_harness import Array, fill, from_bf16, run, run_call, to_bf16
from quantised import Quantised, random_quantised, rows16
from reference import round_bf16

from lily.device.device import Device

EPS = 1e-6


class Moe:
    """A small mixture of experts with a shared expert of another quantisation, and rows to route."""

    def __init__(self, bits: int, rows: int, *, experts: int = 7, active: int = 3, h: int = 96, n: int = 32) -> None:
        rng = np.random.default_rng(bits * 1000 + rows)
        self.rows, self.experts, self.active, self.h, self.n, self.bits = rows, experts, active, h, n, bits
        self.gate, self.up = ([random_quantised(rng, n, h, bits, 32) for _ in range(experts)] for _ in range(2))
        self.down = [random_quantised(rng, h, n, bits, 32) for _ in range(experts)]
        self.shared_down = random_quantised(rng, h, 64, 12 - bits, 64)
        self.w_gate_up = rows16(*(m for pair in zip(self.gate, self.up, strict=True) for m in pair))
        self.w_down, self.w_shared = rows16(*self.down), rows16(self.shared_down)
        self.x = rng.normal(size=(rows, h)).astype(np.float32)
        self.norm = rng.normal(size=h).astype(np.float32)
        self.logits = rng.normal(size=(rows, experts + 1)).astype(np.float32)
        self.logits[:, 2] += 2  # one crowded expert
        self.logits[:, 5] -= 9  # and one that nobody wants
        self.shared = rng.normal(size=(rows, 64)).astype(np.float32)
        self.constants = self.gate[0].constants

    def decode(self, device: Device, m: int, per_group: int = 16) -> dict[str, Array]:
        """Row m through moe_gate_up and moe_down; all their outputs."""
        a = self.active
        act, ids, weights = fill((a, self.n)), fill(a, np.int32), fill(a)
        x, logits = self.x[m].copy(), self.logits[m].copy()
        arrays = {
            "x": x, "norm": self.norm, "logits": logits, "w": self.w_gate_up, "act": act,
            "ids": ids, "weights": weights,
        }  # fmt: skip
        params = {
            "n": self.n, "k": self.h, "eps": EPS, "experts": self.experts, "active": a, "renorm": 1,
            "rows_per_group": per_group,
        }  # fmt: skip
        first = Call("moe_gate_up", arrays, params, self.constants, (-(-self.n // per_group), a))
        arrays = {
            "act": act, "ids": ids, "weights": weights, "logits": logits, "w": self.w_down,
            "shared": self.shared[m].copy(), "w_shared": self.w_shared, "x": x,
        }  # fmt: skip
        params = {
            "n": self.h, "k": self.n, "ks": 64, "experts": self.experts, "active": a, "rows_per_group": per_group,
        }  # fmt: skip
        constants = {**self.constants, "shared_bits": self.shared_down.bits, "shared_group": self.shared_down.group}
        second = Call("moe_down", arrays, params, constants, (-(-self.h // per_group),))
        done = run_calls(device, [first, second])
        return {**done[0], **done[1]}

    def prefill(self, device: Device, tile_m: int, tile_n: int = 16) -> dict[str, Array]:
        """All rows through the grouped kernels; outputs of the last call of each name."""
        rows, a, i32 = self.rows, self.active, np.int32
        tiles = -(-rows * a // tile_m) + self.experts
        step = np.array([0, rows, 0, 0], i32)
        x, normed = self.x.copy(), fill(self.x.shape)
        ids, weights = fill((rows, a), i32), fill((rows, a))
        offsets, order, blocks = fill(self.experts + 1, i32), fill(rows * a, i32), fill((tiles, 2), i32)
        act, y, shared = fill((rows * a, self.n)), fill((rows * a, self.h)), fill((rows, self.h))
        routed = {"step": step, "offsets": offsets, "order": order, "blocks": blocks}
        sizes = {"experts": self.experts, "active": a, "tile_n": tile_n}
        dense = {"pitch": self.h, "column": 0, "tile_n": 16}
        tiled = {**self.constants, "tile_m": tile_m}
        calls = [
            Call("rmsnorm", {"step": step, "x": x, "norm": self.norm, "y": normed},
                 {"k": self.h, "eps": EPS}, {}, (rows,)),
            Call("gemm", {"step": step, "x": self.shared, "w": self.w_shared, "y": shared},
                 {"n": self.h, "k": 64, **dense}, {**self.shared_down.constants, "tile_m": 512}, (-(-self.h // 16), 1)),
            Call("route_topk", {"step": step, "logits": self.logits, "ids": ids, "weights": weights},
                 {"experts": self.experts, "active": a, "renorm": 1}, {}, (rows,)),
            Call("route_group", {"step": step, "ids": ids, "offsets": offsets, "order": order, "blocks": blocks},
                 {"experts": self.experts, "active": a, "tile_m": tile_m, "max_blocks": tiles}, {}, (1,)),
            Call("moe_gemm_gate_up", {**routed, "x": normed, "w": self.w_gate_up, "y": act},
                 {"n": self.n, "k": self.h, **sizes}, tiled, (-(-self.n // tile_n), tiles)),
            Call("moe_gemm_down", {**routed, "x": act, "w": self.w_down, "y": y},
                 {"n": self.h, "k": self.n, **sizes}, tiled, (-(-self.h // tile_n), tiles)),
            Call("moe_combine",
                 {"step": step, "y": y, "weights": weights, "logits": self.logits, "shared": shared, "x": x},
                 {"hidden": self.h, "experts": self.experts, "active": a}, {}, (rows,)),
        ]  # fmt: skip
        done = run_calls(device, calls)
        return {"ids": done[2]["ids"], "weights": done[2]["weights"], "x": done[6]["x"]}

    def exact(self, device: Device, m: int) -> tuple[Array, Array, Array]:
        """(ids, weights, x) of row m in float64, with the path's rounding of activations."""

        def rounded(v: Array, bits: int) -> Array:
            return round_bf16(v).astype(np.float64) if device.info["isa"] in ("amx", "avx512bf16") and bits == 4 else v

        x, p = self.x[m].astype(np.float64), self.logits[m].astype(np.float64)
        h = rounded(x / np.sqrt(np.mean(x * x) + EPS) * self.norm, self.bits)
        ids = np.argsort(-p[: self.experts], kind="stable")[: self.active]
        weights = np.exp(p[ids]) / np.exp(p[ids]).sum()
        total = np.zeros(self.h)
        for i, weight in zip(ids, weights, strict=True):
            g, u = self.gate[i].dense @ h, self.up[i].dense @ h
            total += weight * (self.down[i].dense @ rounded(g / (1 + np.exp(-g)) * u, self.bits))
        shared = self.shared_down.dense @ rounded(self.shared[m].astype(np.float64), self.shared_down.bits)
        return ids, weights, total + shared / (1 + np.exp(-p[self.experts])) + x


@pytest.mark.parametrize("bits", [4, 8])
def test_decode_computes_the_mixture(device: Device, bits: int) -> None:
    moe = Moe(bits, rows=4)
    for m in range(moe.rows):
        ids, weights, x = moe.exact(device, m)
        got = moe.decode(device, m)
        assert np.array_equal(got["ids"], ids)
        assert np.allclose(got["weights"], weights, rtol=1e-5)
        # With bf16 activations a value at a rounding edge may round the other way.
        tolerance = 3e-3 if device.info["isa"] in ("amx", "avx512bf16") else 3e-5
        assert np.max(np.abs(got["x"] - x)) < tolerance


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_prefill_has_the_bits_of_decode(device: Device, bits: int, rows: int) -> None:
    moe = Moe(bits, rows)
    expected = [moe.decode(device, m, 16 if m % 2 else 32) for m in range(rows)]
    for tile_m, tile_n in ((1, 16), (8, 32), (32, 16), (64, 16)):
        got = moe.prefill(device, tile_m, tile_n)
        for m in range(rows):
            assert np.array_equal(got["ids"][m], expected[m]["ids"])
            assert np.array_equal(got["weights"][m], expected[m]["weights"])
            assert np.array_equal(got["x"][m], expected[m]["x"])


def test_odd_widths(device: Device) -> None:
    moe = Moe(4, rows=3, experts=6, active=6, h=160, n=32)
    got = moe.prefill(device, 8)
    for m in range(3):
        assert np.array_equal(moe.decode(device, m)["x"], got["x"][m])


def test_single_matrices_of_experts(device: Device) -> None:
    """moe_gemv on gate, up and down alone gives moe_gate_up's and moe_down's products."""
    moe = Moe(4, rows=1)
    ids = np.array([5, 0, 5], np.int32)
    h = moe.x[0]
    for first, matrices in ((0, moe.gate), (32, moe.up)):
        arrays = {"x": h, "ids": ids, "w": moe.w_gate_up, "y": fill((3, moe.n))}
        params = {"n": moe.n, "k": moe.h, "first": first, "stride": 64, "broadcast": 1, "rows_per_group": 16}
        got = run(device, "moe_gemv", arrays, params, moe.constants, (2, 3))["y"]
        rounded = round_bf16(h) if device.info["isa"] in ("amx", "avx512bf16") else h
        assert np.allclose(got, [matrices[i].dense @ rounded for i in ids], rtol=1e-4, atol=1e-5)


# ---- matrices expanded to memory ------------------------------------------------------------------------------------


def expanded(device: Device, *matrices: Quantised) -> Array:
    """bf16 bits [E, n, k]."""
    n, k = matrices[0].values.shape
    arrays = {"w": rows16(*matrices), "y": fill((len(matrices), n, k), np.uint16)}
    params = {"experts": len(matrices), "n": n, "k": k}
    return run(device, "expand", arrays, params, matrices[0].constants, (len(matrices) * n,))["y"]


@pytest.mark.parametrize(
    ("bits", "group", "n", "k"), [(4, 32, 1, 96), (4, 64, 40, 128), (8, 32, 16, 64), (8, 128, 33, 256)]
)
def test_matrices_are_expanded_to_bf16(device: Device, bits: int, group: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    matrices = [random_quantised(rng, n, k, bits, group) for _ in range(3)]
    got = expanded(device, *matrices)
    want = np.stack([m.dense for m in matrices])
    # scale·q + bias is rounded to float32, with fused multiply-add once, else twice, before it is rounded to bf16.
    assert np.allclose(from_bf16(got), want, rtol=2**-8 * 1.001, atol=1e-7)
    assert np.mean(got == to_bf16(want)) > 0.99


@pytest.mark.parametrize("tile_m", [1, 7, 32])
@pytest.mark.parametrize(("n", "first", "stride"), [(33, 0, 33), (20, 16, 48)])
def test_products_of_expanded_matrices(device: Device, n: int, first: int, stride: int, tile_m: int) -> None:
    """Any tile gives each row the bits that it has alone; rows are gathered, or results scattered."""
    rng = np.random.default_rng(n + tile_m)
    rows, experts, active, k = 13, 6, 3, 96
    dense = round_bf16(rng.normal(size=(experts, stride, k)).astype(np.float32))
    preference = rng.random((rows, experts))
    preference[:, -1] = 2  # nobody's
    ids = np.argsort(preference, 1)[:, :active].reshape(-1)
    order = np.argsort(ids, kind="stable").astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=experts))]).astype(np.int32)
    blocks = [(e, at) for e in range(experts) for at in range(offsets[e], offsets[e + 1], tile_m)] + [(-1, 0)] * 2
    for gather in (0, 1):
        x = rng.normal(size=(rows if gather else rows * active, k)).astype(np.float32)
        arrays = {
            "step": np.array([0, rows, 0, 0], np.int32), "x": x, "offsets": offsets, "order": order,
            "blocks": np.array(blocks, np.int32), "w": to_bf16(dense),
            "y": fill((rows * active, n)),
        }  # fmt: skip
        params = {
            "n": n, "k": k, "first": first, "stride": stride, "experts": experts, "active": active, "gather": gather,
            "tile_n": 16,
        }  # fmt: skip
        call = Call("moe_gemm_expanded", arrays, params, {"tile_m": tile_m}, (-(-n // 16), len(blocks)))
        got = run_call(device, call)["y"]
        for place, a in enumerate(order):
            w, row = dense[ids[a], first : first + n].astype(float), x[a // active if gather else place].astype(float)
            assert np.allclose(got[place if gather else a], w @ row, rtol=1e-5, atol=1e-4)
        alone = Call(
            "moe_gemm_expanded", {**arrays, "blocks": _single(offsets), "y": fill(got.shape)}, params,
            {"tile_m": 1}, (-(-n // 16), len(order)),
        )  # fmt: skip
        assert np.array_equal(run_call(device, alone)["y"], got)


def _single(offsets: Array) -> Array:
    """A block map of one row a tile."""
    experts = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.stack([experts, np.arange(offsets[-1])], 1).astype(np.int32)
