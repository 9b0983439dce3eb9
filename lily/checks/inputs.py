# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a case hold: numbers from a seed, in the ranges in which the model has them.

Activations are bfloat16 numbers, which every device can hold, so that all start from the same.  Outputs hold NaN, or a
number that no kernel writes, so that it shows what was written.  No choice hangs on the order in which something is
added up.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from lily.checkpoint.config import QuantSpec
from lily.checks.cases import Case, numbers
from lily.checks.values import Array, Quantised, Value, count, round_bf16, stored
from lily.kernels import Arg
from lily.plan.views import View
from lily.plan.weights_map import align, matrix_bytes
from lily.policy import Policy

UNWRITTEN = 0x5A5A5A5A
_PERIOD = 4_194_301  # prime: no two rows or experts of a matrix are alike
_PEAKS = (0.5, 0.3, 0.15, 0.05)  # probabilities of the four likeliest ids
_THETA = 1e7
_BIASES = 4


def make_inputs(case: Case, policy: Policy, seed: int = 0) -> dict[str, Value]:
    """Every argument of ``case.tested``, whose device has ``policy``; ``seed`` gives others."""
    return _Inputs(case, policy, seed).all()


class _Inputs:
    def __init__(self, case: Case, policy: Policy, seed: int) -> None:
        self.case, self.policy = case, policy
        self.rng = np.random.default_rng((zlib.crc32(case.name.encode()), seed))
        self.numbers = numbers(case.tested)
        self.views: dict[str, tuple[Arg, View]] = {
            a.name: (a, v) for a, v in zip(case.tested.kernel.args, case.tested.views, strict=True)
        }
        self.made: dict[str, Value] = {}

    def all(self) -> dict[str, Value]:
        for name in self.views:
            self.get(name)
        return {name: self.made[name] for name in self.views}

    def get(self, name: str) -> Any:
        """The value of an argument; others may depend on it."""
        if name not in self.made:
            self.made[name] = self._make(*self.views[name])
        return self.made[name]

    def _make(self, arg: Arg, view: View) -> Value:
        if arg.dtype in ("q", "qrows"):
            return self._matrix(arg, view)
        if arg.dtype == "Step":
            return self._step() if arg.reads else np.zeros(1, stored(arg, self.policy))
        if arg.dtype == "Request":
            return self._request()
        size = count(arg, view, self.policy)
        if not arg.reads:
            return _unwritten(size, stored(arg, self.policy), arg.dtype)
        if arg.dtype == "act":
            return round_bf16(self._activations(arg, size))
        value = maker_of(self.case.kernel, arg.name)(self, size)
        return round_bf16(value) if arg.dtype == "bf16" else value

    def _activations(self, arg: Arg, size: int) -> Array:
        if self.case.kernel == "probe_matrix":
            return self.rng.integers(-8, 9, size).astype(np.float32)  # sums of these are exact
        noise = self.noise(size)
        if self.case.kernel.startswith("gdn_scan") and arg.name in ("q", "k"):
            # As gdn_conv leaves them: k of length 1, q of length 1/√Dk; else the state would grow without end.
            length = math.sqrt(self.numbers["dk"])
            noise /= length if arg.name == "k" else length * length
        return noise

    def noise(self, size: int) -> Array:
        """Normal numbers of size 1."""
        return repeated(self.rng.standard_normal(min(size, _PERIOD), np.float32), size)

    def whole(self, size: int) -> Array:
        """Small whole numbers."""
        return self.rng.integers(0, 4, size).astype(np.int32)

    def octets(self, size: int) -> Array:
        return self.rng.integers(0, 256, size, np.uint8)

    # ---- structures
    def _step(self) -> Array:
        out = np.zeros(1, stored(self.views["step"][0], self.policy))
        out["position"], out["rows"], out["count"] = self.case.position, self.case.rows, 3
        return out

    def _request(self) -> Array:
        out = np.zeros(1, stored(self.views["request"][0], self.policy))
        vocab = self.case.config.vocab_size
        # At one size top-p decides what is kept, at the other top-k.
        values = {
            "temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "top_k": 0 if self.case.size.name == "small" else 2,
            "repetition_penalty": 1.1, "repetition_window": 20, "presence_penalty": 0.2, "frequency_penalty": 0.1,
            "seed_low": 12345, "seed_high": 678, "vocab": vocab - 3, "bias_count": _BIASES, "stop_count": 2,
            "top_logprobs": 5, "masked": 1,
        }  # fmt: skip
        for name, value in values.items():
            out[name] = value
        out["stop_ids"][0, :2] = 1, 2
        return out

    # ---- quantised matrices
    def _matrix(self, arg: Arg, view: View) -> Quantised:
        """A matrix of the shape that the kernel table gives the argument, in numbers of this dispatch."""
        prefix = "shared_" if arg.name == "w_shared" else ""
        bits, group = self.numbers[prefix + "bits"], self.numbers[prefix + "group"]
        *_, rows, columns = arg.shape.strip("[]").split(",")
        parts = 2 if rows.startswith("2*") else 1
        names = {"V": "vocab", "H": "hidden"}
        n = self.numbers[names.get(rows.removeprefix("2*"), rows.removeprefix("2*"))]
        k = self.numbers[names.get(columns, columns)]
        layout = "rows" if arg.dtype == "qrows" else self.policy.layout
        block = self.policy.row_block if parts > 1 else 1
        one = align(matrix_bytes(layout, parts * align(n, block), k, QuantSpec(bits, group)))
        return random_matrix(self.rng, view.nbytes // one, parts, n, k, bits, group)

    # ---- routing
    def expert_ids(self, rows: int) -> Array:
        """Different experts for each of ``rows`` rows, the first ones most often: [rows·active]."""
        config = self.case.config
        active = config.experts_per_token
        drawn = self.rng.random((rows, config.num_experts)) * np.linspace(0.5, 1.5, config.num_experts)
        chosen = np.argsort(drawn, axis=1)[:, :active]
        return chosen.reshape(-1).astype(np.int32)

    def text_ids(self, size: int) -> Array:
        return self.rng.integers(0, self.case.config.vocab_size, size).astype(np.int32)

    def chosen_ids(self, size: int) -> Array:
        out = np.zeros(size, np.int32)
        rows = size // self.case.config.experts_per_token
        out[:] = self.expert_ids(rows)
        return out

    @cached_property
    def grouped(self) -> tuple[Array, Array, Array]:
        """What route_group makes of random assignments: a stable sort by expert, and tiles of one expert.

        (offsets, order, blocks)
        """
        experts, tile = self.numbers["experts"], self.numbers["tile_m"]
        ids = self.expert_ids(self.case.rows)
        order = np.argsort(ids, kind="stable").astype(np.int32)
        offsets = np.searchsorted(ids[order], np.arange(experts + 1)).astype(np.int32)
        blocks = [(e, place) for e in range(experts) for place in range(int(offsets[e]), int(offsets[e + 1]), tile)]
        return offsets, order, np.array(blocks, np.int32).reshape(-1)

    def offsets(self, size: int) -> Array:
        return self.grouped[0]

    def order(self, size: int) -> Array:
        return np.resize(self.grouped[1], size)  # beyond the rows of the step nothing is read

    def blocks(self, size: int) -> Array:
        out = np.tile(np.array([-1, 0], np.int32), size // 2)
        found = self.grouped[2]
        out[: len(found)] = found
        return out

    # ---- recurrence and attention
    def near_one(self, size: int) -> Array:
        return self.rng.normal(1, 0.3, size).astype(np.float32)

    def a_log(self, size: int) -> Array:
        return np.log(self.rng.uniform(1, 16, size)).astype(np.float32)

    def fraction(self, size: int) -> Array:
        return self.rng.uniform(0.3, 0.999, size).astype(np.float32)

    def small(self, size: int) -> Array:
        return self.noise(size) * np.float32(0.2)

    def inv_freq(self, size: int) -> Array:
        return (_THETA ** (-np.arange(size) / size)).astype(np.float32)

    def part_ml(self, size: int) -> Array:
        """(maximum, sum of exponentials) of each split of the cache."""
        pairs = np.stack([self.rng.normal(0, 2, size // 2), self.rng.uniform(1, 50, size // 2)], axis=1)
        return pairs.astype(np.float32).reshape(-1)

    def route_weights(self, size: int) -> Array:
        return (self.rng.uniform(0.2, 1.8, size) / self.case.config.experts_per_token).astype(np.float32)

    # ---- sampling
    def even_logits(self, size: int) -> Array:
        """Of experts, or of rows that are scored: nothing stands out."""
        return self.noise(size) * np.float32(2)

    def peaked_logits(self, size: int) -> Array:
        """Logits of a vocabulary; four ids have nearly all of the probability."""
        out = self.noise(size) * np.float32(0.5)
        ids = self.rng.choice(size - 8, len(_PEAKS), replace=False)
        out[ids] = [20 + math.log(p) for p in _PEAKS]
        return out

    def _slices(self) -> tuple[Array, int]:
        """(logits, how many of them a group of the sampler reads)."""
        return self.get("logits" if "logits" in self.views else "y"), self.policy.sample_slice

    def best(self, size: int) -> Array:
        """(greatest, its id as bits) of every slice."""
        values, width = self._slices()
        out = np.zeros((size // 2, 2), np.float32)
        for i in range(size // 2):
            part = values[i * width : (i + 1) * width]
            out[i, 0] = part.max()
            out[i, 1:].view(np.int32)[0] = i * width + int(part.argmax())
        return out.reshape(-1)

    def stats(self, size: int) -> Array:
        """(maximum, sum of exponentials) of raw and of changed logits, for every slice."""
        values, width = self._slices()
        out = np.zeros((size // 4, 4), np.float32)
        for i in range(size // 4):
            part = values[i * width : (i + 1) * width].astype(np.float64)
            out[i] = [part.max(), np.exp(part - part.max()).sum()] * 2
        return out.reshape(-1)

    def cut(self, size: int) -> Array:
        """Keeps the three likeliest ids."""
        out = np.zeros(2, np.float32)
        out[0] = np.sort(self.get("y"))[-3]
        out[1:].view(np.int32)[0] = self.case.config.vocab_size - 1
        return out

    def token_ids(self, size: int) -> Array:
        return self.rng.integers(0, self.case.config.vocab_size - 3, size).astype(np.int32)

    def bias_ids(self, size: int) -> Array:
        ids = self.rng.choice(self.case.config.vocab_size - 3, _BIASES, replace=False)
        return np.resize(ids, size).astype(np.int32)

    def mask(self, size: int) -> Array:
        """A quarter of the ids is masked out."""
        words: Array = self.rng.integers(0, 1 << 32, (2, size), dtype=np.uint32)
        either: Array = words[0] | words[1]
        return either

    def target(self, size: int) -> Array:
        out = self.token_ids(size)
        out[::5] = -1
        return out

    def zeros(self, size: int) -> Array:
        return np.zeros(size, np.int32)


# What an argument holds that is read and is no activation, quantised matrix or structure.  A name means the same in
# every kernel if it stands in the first table; others are in the second, so that a new kernel says what it takes.
_MAKERS: dict[str, Callable[[_Inputs, int], Array]] = {
    "norm": _Inputs.near_one, "q_norm": _Inputs.near_one, "k_norm": _Inputs.near_one, "inv_freq": _Inputs.inv_freq,
    "conv_w": _Inputs.small, "a_log": _Inputs.a_log, "dt_bias": _Inputs.noise, "s_in": _Inputs.small,
    "part_o": _Inputs.noise, "part_ml": _Inputs.part_ml, "offsets": _Inputs.offsets, "order": _Inputs.order,
    "blocks": _Inputs.blocks, "best": _Inputs.best, "stats": _Inputs.stats, "cut": _Inputs.cut,
    "flags": _Inputs.zeros, "history": _Inputs.token_ids, "bias_ids": _Inputs.bias_ids, "bias_values": _Inputs.noise,
    "mask": _Inputs.mask,
    "target": _Inputs.target, "top_ids": _Inputs.whole, "top_values": _Inputs.noise, "counts": _Inputs.whole,
    "src": _Inputs.octets,
}  # fmt: skip
_MAKERS_OF: dict[tuple[str, str], Callable[[_Inputs, int], Array]] = {
    (kernel, argument): maker
    for kernels, argument, maker in (
        ("gdn_scan gdn_scan_blocked", "gate", _Inputs.fraction),
        ("gdn_scan gdn_scan_blocked", "beta", _Inputs.fraction),
        ("embed", "ids", _Inputs.text_ids),
        ("moe_down moe_gemv route_group", "ids", _Inputs.chosen_ids),
        ("moe_down moe_combine", "weights", _Inputs.route_weights),
        ("route_topk moe_gate_up moe_down moe_combine score_rows", "logits", _Inputs.even_logits),
        ("argmax sample_logits top_logprobs advance", "logits", _Inputs.peaked_logits),
        ("sample_filter sample_draw", "y", _Inputs.peaked_logits),
        ("attn_decode attn_decode_prepared attn_prefill", "k", _Inputs.noise),
        ("attn_decode attn_decode_prepared attn_prefill", "v", _Inputs.noise),
        ("moe_gemm_expanded", "w", _Inputs.noise),
        ("gdn_scan_blocked", "s_out", _Inputs.noise),
        ("probe_level", "x", _Inputs.whole),
    )
    for kernel in kernels.split()
}


def maker_of(kernel: str, argument: str) -> Callable[[_Inputs, int], Array]:
    """What makes the values of ``argument``; LookupError unless they are known for this very kernel."""
    maker = _MAKERS_OF.get((kernel, argument)) or _MAKERS.get(argument)
    if maker is None:
        raise LookupError(f"lily/checks/inputs.py does not say what {argument} of {kernel} holds")
    return maker


def repeated(values: Array, size: int) -> Array:
    """``values`` again and again, up to ``size``."""
    out = np.empty(size, values.dtype)
    for at in range(0, size, len(values)):
        part = out[at : at + len(values)]
        part[:] = values[: len(part)]
    return out


def random_matrix(
    rng: np.random.Generator, experts: int, parts: int, n: int, k: int, bits: int, group: int
) -> Quantised:  # fmt: skip
    """Weights of about 1/√k, so that products with unit activations are of order 1."""
    words, groups = experts * parts * n * (k * bits // 32), experts * parts * n * (k // group)
    noise = min(groups, _PERIOD // 4 + 1)
    scales = rng.normal(size=noise) * 4 / (math.sqrt(k) * (1 << bits))
    biases = -scales * (1 << bits) / 2 + rng.normal(size=noise) / math.sqrt(k) / 4
    shape = (experts, parts, n, -1)
    bits16 = [repeated((round_bf16(s).view(np.uint32) >> 16).astype(np.uint16), groups) for s in (scales, biases)]
    all_words = repeated(rng.integers(0, 1 << 32, min(words, _PERIOD), np.uint32), words)
    return Quantised(all_words.reshape(shape), bits16[0].reshape(shape), bits16[1].reshape(shape), bits, group)


def _unwritten(size: int, dtype: np.dtype[Any], kind: str) -> Array:
    if kind in ("act", "bf16", "f32"):
        return np.full(size, np.nan, np.float32)
    out = np.zeros(size * dtype.itemsize, np.uint8)
    out[: len(out) // 4 * 4].view(np.uint32)[:] = UNWRITTEN
    return out.view(dtype)
