# SPDX-License-Identifier: Apache-2.0
"""Calls of the sampling kernels, and references for them: what the tests of CPU kernels and of shaders share.

Not handled: running the calls, on which the tests differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from kernel_calls import Array, Call
from kernel_harness import fill, request, step

from lily.kernels import OUTPUT_RING
from lily.structs import OUTPUT, STEP

NO_ID = 0x7FFFFFFF


def normal_logits(count: int, scale: float = 2, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, count).astype(np.float32)


def winner(best: Array) -> int:
    """The id that the groups' results reduce to: greatest value, then lowest id."""
    ids = best[:, 1].copy().view(np.int32)
    return min(zip(-best[:, 0], ids, strict=True))[1]


def log_total(stats: Array, column: int) -> float:
    top, total = stats[:, column].astype(float), stats[:, column + 1].astype(float)
    return float(top.max() + np.log((total * np.exp(top - top.max())).sum()))


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox-4x32-10 of counters [n, 4], in Python's own integers."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, 1).astype(np.uint32)


def gumbel(count: int, position: int, seed: int) -> Array:
    counter = np.zeros((-(-count // 4), 4), np.uint32)
    counter[:, 0], counter[:, 1] = np.arange(len(counter)), position
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]
    u = ((words >> 8).astype(float) + 0.5) / 2**24
    return -np.log(-np.log(u))


def argmax_call(logits: Array, vocab: int, size: int) -> Call:
    groups = -(-len(logits) // size)
    args = {"request": request(vocab), "logits": logits, "best": fill((groups, 2)), "flags": fill(groups, np.int32)}
    return Call("argmax", args, {"slice": size}, grid=(groups,), threads=(64,))


def logits_call(
    logits: Array, req: Array, size: int, history: Array, counts: Array | None = None,
    bias: dict[int, float] | None = None, position: int = 0, rows: int = 1, allowed: Iterable[int] | None = None,
) -> Call:  # fmt: skip
    bias = bias or {}
    groups = -(-len(logits) // size)
    req["bias_count"] = len(bias)
    mask = np.zeros(-(-len(logits) // 32), np.uint32)  # not to be read unless the request says so
    for id in allowed or ():
        mask[id // 32] |= np.uint32(1 << id % 32)
    req["masked"] = allowed is not None
    args = {
        "step": step(position, rows), "request": req, "logits": logits,
        "bias_ids": np.array([*bias, 0], np.int32), "bias_values": np.array([*bias.values(), 0], np.float32),
        "history": history.astype(np.int32), "counts": np.zeros(len(logits), np.uint32) if counts is None else counts,
        "mask": mask, "y": fill(len(logits)), "stats": fill((groups, 4)), "flags": fill(groups, np.int32),
    }  # fmt: skip
    return Call("sample_logits", args, {"slice": size}, grid=(groups,), threads=(64,))


def draw_call(
    y: Array, *, temperature: float = 1, position: int = 0, rows: int = 1, seed: int = 0,
    cut: tuple[float, int] = (-np.inf, NO_ID), size: int = 1024, vocab: int | None = None,
) -> Call:  # fmt: skip
    groups = -(-len(y) // size)
    threshold = np.array([cut[0], 0], np.float32)
    threshold[1:].view(np.int32)[:] = cut[1]
    req = request(vocab or len(y), temperature=temperature, seed_low=seed & 0xFFFFFFFF, seed_high=seed >> 32)
    args = {"step": step(position, rows), "request": req, "y": y, "cut": threshold, "best": fill((groups, 2))}
    return Call("sample_draw", args, {"slice": size}, grid=(groups,), threads=(64,))


def top_call(logits: Array, vocab: int, want: int) -> Call:
    args = {
        "request": request(vocab, top_logprobs=want), "logits": logits, "top_ids": fill(20, np.int32),
        "top_values": fill(20),
    }  # fmt: skip
    return Call("top_logprobs", args, {"count": len(logits)}, threads=(256,))


def score_call(logits: Array, target: Array, top: int, vocab: int, rows: int, first: int = 0) -> Call:
    limit, count = logits.shape
    m = len(target)
    args = {
        "step": step(0, rows), "request": request(vocab), "logits": logits, "target": target.astype(np.int32),
        "logprobs": fill(m), "top_ids": fill((m, top), np.int32), "top_logprobs": fill((m, top)),
        "flags": fill(m, np.int32),
    }  # fmt: skip
    params = {"count": count, "top": top, "first": first, "limit": limit}
    return Call("score_rows", args, params, grid=(limit,), threads=(128,))


def advance_call(at: Array, best: list[tuple[float, int]], **more: Any) -> Call:
    groups, vocab = len(best), 100
    table = np.zeros((groups, 2), np.float32)
    table[:, 0] = [v for v, _ in best]
    table[:, 1:].view(np.int32)[:, 0] = [i for _, i in best]
    args = {
        "step": at, "next_step": np.zeros(1, STEP), "request": more.get("request", request(vocab)), "best": table,
        "flags": np.array(more.get("flags", [0] * groups), np.int32), "logits": more.get("logits", fill(vocab)),
        "stats": more.get("stats", fill((groups, 4))), "top_ids": more.get("top_ids", fill(20, np.int32)),
        "top_values": more.get("top_values", fill(20)), "next_ids": np.array([55], np.int32),
        "history": np.full(64, -1, np.int32), "counts": np.arange(vocab, dtype=np.uint32),
        "outputs": np.zeros(OUTPUT_RING, OUTPUT),
    }  # fmt: skip
    return Call("advance", args, {"groups": groups, "logprobs": int("stats" in more)}, threads=(32,))


def filter_call(y: Array, vocab: int | None = None, groups: int = 3, **fields: Any) -> Call:
    """``fields`` of the request."""
    vocab = len(y) if vocab is None else vocab
    stats = np.full((groups, 4), -np.inf, np.float32)
    stats[:, 1] = stats[:, 3] = 0
    stats[groups // 2, 2] = y[:vocab].max()
    req = request(vocab, **{"temperature": 1, **fields})
    args = {"request": req, "y": y, "stats": stats, "cut": fill(2)}
    return Call("sample_filter", args, {"count": len(y), "groups": groups}, threads=(256,))


def kept_after(cut: Array, y: Array) -> Array:
    """Which ids a cut of sample_filter keeps."""
    with np.errstate(invalid="ignore"):
        return (y > cut[0]) | ((y == cut[0]) & (np.arange(len(y)) <= cut[1:].view(np.int32)[0]))


def kept_by(y: Array, top_p: float = 1, min_p: float = 0, top_k: int = 0) -> tuple[Array, float]:
    """The expected set, and how close the top-p boundary is to going the other way (in probability)."""
    y64 = y.astype(float)
    order = np.argsort(-y64, kind="stable")
    p = np.exp(y64 - y64.max())
    mass = np.cumsum(p[order]) / p.sum()
    n, margin = len(y), 1.0
    if top_p < 1:
        reach = np.float64(np.float32(top_p))
        n = int(np.argmax(mass >= reach)) + 1
        margin = float(np.abs(mass - reach).min())
    if min_p > 0:
        n = min(n, int((y64 >= y64.max() + np.log(np.float64(np.float32(min_p)))).sum()))
    if top_k > 0:
        n = min(n, top_k)
    keep = np.zeros(len(y), bool)
    keep[order[:n]] = True
    return keep, margin
