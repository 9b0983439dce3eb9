# SPDX-License-Identifier: Apache-2.0
"""Reads out of an engine what its public calls do not show: logits of every step, states, caches; forces tokens.

Not handled: single kernels (kernel_harness.py); checkpoints to run (models.py, checkpoints.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lily.device import Device
from lily.engine import Engine
from lily.plan.memory import kv_layers, kv_row_bytes
from lily.runner import Runner
from lily.sampling import SamplingParams

DATA = Path(__file__).parent / "data"
TINY, TINY_VL = DATA / "random-tiny", DATA / "random-tiny-vl"

Array = Any
GREEDY = SamplingParams(temperature=0.0, seed=0)


def isa_paths() -> list[str]:
    """The cpu device's instruction-set paths that this machine has, best first."""
    with Device("cpu", threads=1) as device:
        return device.info["isas"].split(",")


def rounds_activations(isa: str) -> bool:
    """Whether a path rounds to bfloat16 what enters a matrix product; the others compute in float32."""
    return isa not in ("portable", "avx2", "avx512", "neon")


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Sets an environment variable for a while; None takes it away."""
    old = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if old is not None:
            os.environ[name] = old


def open_engine(model: Path | None, isa: str | None = None, **options: Any) -> Engine:
    """An engine on the cpu device, on the given instruction-set path."""
    with environment("LILY_CPU", isa or os.environ.get("LILY_CPU")):
        return Engine(model, device="cpu", **options)


def runner_of(engine: Engine) -> Runner:
    """The engine's runner."""
    return engine._runner


def current_logits(engine: Engine) -> Array:
    """Logits of the last sampled row, padding rows included."""
    return runner_of(engine)._buffers["logits"].array(np.float32, engine.config.vocab_size).copy()


def current_state(engine: Engine) -> bytes:
    """All that decides what follows: recurrent and convolution state, and the KV rows in use."""
    r = runner_of(engine)
    used = len(r.tokens) * kv_row_bytes(r.config)
    parts = [r._state()] + [r._buffers[f"kv.{i}.{which}"].bytes[:used] for i in kv_layers(r.config) for which in "kv"]
    return b"".join(part.tobytes() for part in parts)


def force(engine: Engine, token: int) -> None:
    """Makes `token` the input of the next decode step. Nothing may be in flight: Engine(ablate=["handoff"])."""
    r = runner_of(engine)
    assert not r._pipeline.in_flight
    r._buffers[f"ids.{'AB'[r._slot]}"].array(np.int32)[0] = token
    r._buffers["history"].array(np.int32)[len(r.tokens)] = token
    r._last = token


def forced_logits(engine: Engine, tokens: Sequence[int], split: int, cuts: Iterable[int] = ()) -> Array:
    """Logits after each of the tokens from number `split` on, [len(tokens) - split + 1, vocab].

    The first `split` tokens are the prompt, run in chunks with edges at `cuts`; the others go through decode steps.
    """
    r = runner_of(engine)
    r.reset()
    edges = sorted({0, *(c for c in cuts if 0 < c < split), split})
    chunks = list(pairwise(edges))
    for start, end in chunks[:-1]:
        r.prefill(tokens[start:end])
    r.start(tokens[chunks[-1][0] : split], GREEDY, (), len(tokens) - split + 1)
    rows = []
    for token in [*tokens[split:], None]:
        assert r.next() is not None
        rows.append(current_logits(engine))
        if token is not None:
            force(engine, token)
    r.stop()
    return np.stack(rows)


def log_softmax(logits: Array) -> Array:
    """Along the last axis, in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
