# SPDX-License-Identifier: Apache-2.0
"""Reads out of an engine what its public calls do not show: logits of every step, states, caches; forces tokens.

Not handled: single kernels (kernel_harness.py); checkpoints to run (models.py, checkpoints.py).
"""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from engine_device import current
from paths import DATA

from lily.checkpoint.config import ModelConfig
from lily.device.device import Buffer, Device
from lily.engine import Completion, Engine
from lily.errors import DeviceError
from lily.plan.memory import kv_layers
from lily.policy import POLICIES
from lily.run.budget import SNAPSHOTS
from lily.run.reply import Reply, Token
from lily.run.runner import Runner, whole
from lily.run.sequence import Sequence
from lily.sampling import SamplingParams

TINY, TINY_VL = DATA / "random-tiny", DATA / "random-tiny-vl"

Array = Any
GREEDY = SamplingParams(temperature=0.0, seed=0)

# (most, mean) by which rounding to bfloat16 moves the random checkpoints' logits, of rms 1, where it changes no choice
# of experts. Of what enters a product, as some paths of the cpu do: 0.033 and 0.007 seen. Of all that crosses a kernel
# boundary, the residual stream first of all: 0.097 and 0.0095 seen.
_ROUNDED_PRODUCTS, _ROUNDED_ACTIVATIONS = (0.06, 0.012), (0.15, 0.015)

# Rounding moves router logits by up to 0.025 each, so experts whose logits are closer than twice that may change
# places; such a row then differs by a whole expert (0.4 to 0.7 seen, 2 of 33 rows).
NEAR_TIE = 0.05
FLIPPED_ROWS = 0.1  # share of all rows, of which a third are near a tie

CLEAR_LEAD = 0.2  # of the best logit over the next one: rounding moves lily-tiny's logits by 0.02 on average


SPLIT = 64  # tokens of the prompt in golden ``prefill64_then_decode_logits``


@cache
def golden(model: Path) -> dict[str, Array]:
    """mlx-lm's results in float32 for a text, with a random checkpoint."""
    with np.load(model / "golden_mlx_lm_f32.npz") as file:
        return dict(file)


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


def open_engine(model: Path | None, **options: Any) -> Engine:
    """An engine on the device of the running test (engine_device.py), with one sequence unless it is said."""
    target = current()
    with environment("LILY_CPU", target.isa or os.environ.get("LILY_CPU")):
        return Engine(model, device=target.name, **{"sequences": 1} | options)


@contextmanager
def policy(**changes: Any) -> Iterator[None]:
    """Lets engines that are opened meanwhile have a changed policy, so that short texts cross its edges."""
    name = current().name
    kept = POLICIES[name]
    POLICIES[name] = replace(kept, **changes)
    try:
        yield
    finally:
        POLICIES[name] = kept


def rounding() -> tuple[float, float]:
    """How far logits of a device that rounds may be from exact ones: at most, and on average."""
    return _ROUNDED_PRODUCTS if current().name == "cpu" else _ROUNDED_ACTIVATIONS


def runner_of(engine: Engine) -> Runner:
    """The engine's runner."""
    return engine._runner


def sequence_of(engine: Engine) -> Sequence:
    """The engine's sequence, of several the one that was used last."""
    return engine._residents.latest.sequence


def current_logits(engine: Engine) -> Array:
    """Logits of the last sampled row, padding rows included."""
    return runner_of(engine).recorder.buffers["logits"].read().view(np.float32)[: engine.config.vocab_size]


def current_state(engine: Engine) -> bytes:
    """All that decides what follows: recurrent and convolution state, and the KV rows in use."""
    s = sequence_of(engine)
    used = len(s.tokens) * s.kv_row_bytes
    parts = [s._state.read(), *(rows.read(0, used) for rows in s.kv.values())]
    return b"".join(part.tobytes() for part in parts)


@contextmanager
def device_buffers() -> Iterator[list[Buffer]]:
    """Every device buffer that is made meanwhile."""
    made: list[Buffer] = []
    new = Device.buffer

    def noted(device: Device, nbytes: int, *, shared: bool = True) -> Buffer:
        made.append(new(device, nbytes, shared=shared))
        return made[-1]

    with mock.patch.object(Device, "buffer", noted):
        yield made


def memory_when_full(engine: Engine, made: abc.Sequence[Buffer]) -> int:
    """Bytes that an engine, whose buffers are ``made``, needs at most: its context full, the largest lists in use.

    What ``score`` gives is left out, as from the sum that decides how much fits; snapshots lie in the host's memory.
    """
    tokens, top = engine.max_context, 4
    engine.score([1] * tokens, top)
    engine.generate([1] * (tokens // 2), max_tokens=tokens, ignore_eos=True)
    rows = POLICIES[engine.info["device"]["name"]].buckets[-1]
    results = rows * 4 * (3 + 2 * top)  # log-probability, flag and target; best ids and theirs
    state = sum(b.nbytes for b in made if b.handle) - results
    return state + SNAPSHOTS * state_bytes(engine.config)


def state_bytes(config: ModelConfig) -> int:
    """Of one state slot on the running test's device: convolution rows and recurrent state of every GDN layer."""
    width = 4 if POLICIES[current().name].act == "f32" else 2
    conv = (config.conv_kernel - 1) * config.conv_dim * width
    recurrent = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    layers = len(config.layer_types) - len(kv_layers(config))
    return layers * sum(-(-part // 256) * 256 for part in (conv, recurrent))


def failing_at(call: int) -> Callable[[Reply], Token | None]:
    """A ``Reply.next`` whose call of that number, from 0 on, fails."""
    following, calls = Reply.next, count()

    def failing(reply: Reply) -> Token | None:
        if next(calls) == call:
            raise DeviceError("injected")
        return following(reply)

    return failing


def force(reply: Reply, token: int) -> None:
    """Makes ``token`` the input of the next decode step. Nothing may be in flight: Engine(ablate=["handoff"])."""
    assert not reply._pipeline.in_flight
    reply.sequence.array("ids", np.int32)[0] = token
    reply.sequence.array("history", np.int32)[len(reply.sequence.tokens)] = token
    reply._last = token


def forced_logits(engine: Engine, tokens: abc.Sequence[int], split: int, cuts: Iterable[int] = ()) -> Array:
    """Logits after each of the tokens from number ``split`` on, [len(tokens) - split + 1, vocab].

    The first ``split`` tokens are the prompt, run in chunks with edges at ``cuts``; the others go through decode steps.
    """
    runner, sequence = runner_of(engine), sequence_of(engine)
    sequence.reset()
    edges = sorted({0, *(c for c in cuts if 0 < c < split), split})
    chunks = list(pairwise(edges))
    for start, end in chunks[:-1]:
        whole(runner.prefill(sequence, tokens[start:end]))
    reply = whole(runner.start(sequence, tokens[chunks[-1][0] : split], GREEDY, (), len(tokens) - split + 1))
    rows = []
    for token in [*tokens[split:], None]:
        assert reply.next() is not None
        rows.append(current_logits(engine))
        if token is not None:
            force(reply, token)
    reply.stop()
    return np.stack(rows)


def assert_same_logits(got: Array, want: Array) -> None:
    """Holds logits to those of other kernels or chunks: the same bits where a row's bits do not depend on these.

    Elsewhere up to rounding. The model must not choose among experts, which rounding could change (all_experts).
    """
    if current().exact:
        assert got.tobytes() == want.tobytes()
        return
    error, (most, mean) = np.abs(got - want), rounding()
    assert error.max() < most
    assert error.mean() < mean


def assert_rounded_logits(got: Array, want: Array, leads: Array, bounds: tuple[float, float]) -> None:
    """Holds rows of logits to exact ones up to rounding: at most and on average ``bounds``.

    But for rows in which rounding may change the choice of experts: where these are nearer to a tie (``leads``).
    """
    clear, error = leads >= NEAR_TIE, np.abs(got - want)
    assert 0.5 < clear.mean() < 1  # otherwise the lines below say little
    most, mean = bounds
    assert error[clear].max() < most
    assert error[clear].mean() < mean
    assert (error.max(1) > most).mean() <= FLIPPED_ROWS


def clear_tokens(reply: Completion) -> list[int]:
    """Of a greedy reply with logprobs=2 what comes before the first token that rounding could exchange."""
    assert reply.logprobs is not None
    leads = [p.top[0][1] - p.top[1][1] for p in reply.logprobs]
    return reply.token_ids[: next((i for i, lead in enumerate(leads) if lead < CLEAR_LEAD), len(leads))]


def message_of(reply: Completion) -> dict[str, Any]:
    """The assistant's message that a conversation keeps of ``reply``."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def log_softmax(logits: Array) -> Array:
    """Along the last axis, in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
