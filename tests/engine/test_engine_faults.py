# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU that fails, runs out of memory, is interrupted, or takes its work in another order.

The GPU is the stand-in for Metal (metal/standin.h).  After every fault the next request gives the bits of a cold run:
tokens, log-probabilities, logits, recurrent state and KV rows.
Not handled: what the shim makes of single errors (test_metal_shim_*.py); faults of the host (test_engine_exact.py).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_device import Target, chosen
from engine_harness import current_logits, current_state, open_engine, policy, sequence_of
from metal.standin import Standin
from models import tiny_model
from waiting import PATIENCE, until

from lily.engine import Completion, Engine
from lily.errors import DeviceError, LilyError

pytestmark = [
    pytest.mark.skipif(
        not any(d.emulated for d in chosen()), reason="faults are made by the stand-in for Metal, not on real devices"
    ),
    pytest.mark.parametrize("device", [Target("metal")], ids=str, indirect=True),
]

# Two chunks of the prompt, two message starts, a cache that grows in steps of 32 tokens.
SMALL = {"chunks": ((0, 16),), "buckets": (8, 16), "kv_step": 32, "message_gap": 1}
PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 900, 20)]
CHUNKS, TOKENS = 2, 4
HOW: dict[str, Any] = {"seed": 7, "temperature": 1.0, "logprobs": 2, "ignore_eos": True}
# Codes of MTLCommandBufferError with what macOS says: (fail_code, fail_text).
WATCHDOG = 1, "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
PAGE_FAULT = 3, "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
OUT_OF_MEMORY = 8, "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"

each_error = pytest.mark.parametrize("error", [WATCHDOG, PAGE_FAULT], ids=["watchdog", "fault"])

Outcome = tuple[list[int], Any, bytes, bytes]


@pytest.fixture(scope="module")
def engine(device: Target) -> Iterator[Engine]:
    with policy(**SMALL):
        engine = open_engine(tiny_model(), max_context=256)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine: Engine) -> Outcome:
    """What a request gives on an engine that remembers nothing."""
    return outcome(engine, ask(engine))


def ask(engine: Engine, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS, **how: Any) -> Completion:
    return engine.generate(prompt, max_tokens=tokens, **{**HOW, **how})


def outcome(engine: Engine, reply: Completion) -> Outcome:
    return reply.token_ids, reply.logprobs, current_logits(engine).tobytes(), current_state(engine)


def is_as_cold(engine: Engine, cold: Outcome) -> bool:
    """Whether the same request gives that now."""
    return outcome(engine, ask(engine)) == cold


def command_buffers(engine: Engine) -> int:
    return int(engine._device.info["command_buffers"])


def fail_next(stand_in: Standin, engine: Engine, ahead: int, error: tuple[int, str]) -> None:
    """The command buffer that is ``ahead`` from now (1: the next one) ends with an error, after it has run."""
    stand_in.set(fail_submission=command_buffers(engine) + ahead, fail_code=error[0], fail_text=error[1])


# ---- order ----------------------------------------------------------------------------------------------------------


ORDERS = [{"order": 1}, {"order": 2, "seed": 1}, {"order": 2, "seed": 2}]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_any_order_of_dispatches_between_barriers_gives_the_same_bits(engine, cold, stand_in, order):
    stand_in.set(**order)
    sequence_of(engine).reset()
    assert is_as_cold(engine, cold)
    score = engine.score(PROMPT, top_k=3)
    stand_in.set(order=0)
    again = engine.score(PROMPT, top_k=3)
    assert score.logprobs.tobytes() == again.logprobs.tobytes()
    assert score.top_ids.tobytes() == again.top_ids.tobytes()


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0, "logprobs": None}, {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
def test_any_order_serves_every_way_to_sample(engine, stand_in, sampling):
    want = outcome(engine, ask(engine, **sampling))
    stand_in.set(order=2, seed=9)
    sequence_of(engine).reset()
    assert outcome(engine, ask(engine, **sampling)) == want


def test_any_order_serves_a_conversation(engine, stand_in):
    def talk(order: int) -> list[Any]:
        stand_in.set(order=order, seed=4)
        sequence_of(engine).reset()
        session = engine.session(template_kwargs={"enable_thinking": False})
        return [
            (turn.text, turn.token_ids, turn.cached_tokens > 0)
            for turn in (session.send(text, max_tokens=3, temperature=0) for text in ("Hello", "And you?"))
        ]

    plain = talk(0)
    assert plain[1][2]
    assert talk(2) == plain


# ---- failed command buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", range(1, CHUNKS + 1))
@each_error
def test_a_chunk_that_fails_once_is_run_again(engine, cold, stand_in, ahead, error):
    sequence_of(engine).reset()
    before = command_buffers(engine)
    fail_next(stand_in, engine, ahead, error)
    assert outcome(engine, ask(engine)) == cold
    assert command_buffers(engine) == before + CHUNKS + TOKENS - 1 + 1
    assert is_as_cold(engine, cold)


@pytest.mark.parametrize("ahead", range(1, CHUNKS + 1))
def test_a_chunk_that_always_fails_is_an_error(engine, cold, stand_in, monkeypatch, ahead):
    sequence_of(engine).reset()
    wait, device = engine._device.wait, engine._device
    fail_next(stand_in, engine, ahead, WATCHDOG)

    def failing(ticket: int, timeout: float | None = None) -> bool:
        try:
            return wait(ticket, timeout)
        except DeviceError:
            fail_next(stand_in, engine, 1, WATCHDOG)
            raise

    monkeypatch.setattr(device, "wait", failing)
    with pytest.raises(DeviceError, match=r"kept the screen waiting.*try again"):
        ask(engine)
    monkeypatch.undo()
    stand_in.set(fail_submission=0)
    assert is_as_cold(engine, cold)


@pytest.mark.parametrize("ahead", range(1, CHUNKS + 1))
def test_a_chunk_for_which_there_is_no_memory_is_an_error(engine, cold, stand_in, ahead):
    sequence_of(engine).reset()
    fail_next(stand_in, engine, ahead, OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"out of memory.*max_context"):
        ask(engine)
    assert is_as_cold(engine, cold)


@pytest.mark.parametrize("order", [0, 2])
@pytest.mark.parametrize("step", range(1, TOKENS))
@each_error
def test_a_step_that_fails_ends_the_reply_with_an_error(engine, cold, stand_in, step, order, error):
    """The first, a middle one, the last; mostly another one is in flight behind it."""
    sequence_of(engine).reset()
    stand_in.set(order=order, seed=step)
    fail_next(stand_in, engine, CHUNKS + step, error)
    stream = engine.stream(PROMPT, max_tokens=TOKENS, **HOW)
    assert [next(stream).token_ids[0] for _ in range(step)] == cold[0][:step]  # what came before it is right
    with pytest.raises(DeviceError):
        next(stream)
    assert is_as_cold(engine, cold)


def test_a_failed_step_that_nobody_read(engine, cold, stand_in):
    """Two steps are in flight when the reader goes; the second of them fails."""
    for ahead in (CHUNKS + 1, CHUNKS + 2):
        sequence_of(engine).reset()
        fail_next(stand_in, engine, ahead, PAGE_FAULT)
        stream = engine.stream(PROMPT, max_tokens=50, **HOW)
        assert next(stream).token_ids == cold[0][:1]
        stream.close()
        assert is_as_cold(engine, cold)


def test_a_score_that_fails(engine, cold, stand_in):
    want = engine.score(PROMPT, top_k=2).logprobs.tobytes()
    for ahead in (1, 2):
        fail_next(stand_in, engine, ahead, OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match="out of memory"):
            engine.score(PROMPT, top_k=2)
        assert engine.score(PROMPT, top_k=2).logprobs.tobytes() == want
    assert is_as_cold(engine, cold)


def test_a_turn_that_fails_leaves_the_conversation(engine, stand_in):
    def talk(*, fails: bool) -> list[Any]:
        sequence_of(engine).reset()
        session = engine.session(template_kwargs={"enable_thinking": False})
        replies = [session.send("Hello", max_tokens=3, temperature=0).token_ids]
        if fails:
            before = list(session.messages)
            fail_next(stand_in, engine, 4, OUT_OF_MEMORY)
            with pytest.raises(DeviceError):
                session.send("And you?", max_tokens=3, temperature=0)
            assert session.messages == before
        return [*replies, session.send("And you?", max_tokens=3, temperature=0).token_ids, current_state(engine)]

    assert talk(fails=True) == talk(fails=False)


def test_work_that_cannot_be_encoded(engine, cold, stand_in):
    """Metal gives no encoder: nothing is submitted, in the prompt or beside a step that is in flight."""
    for read in (0, 1, 3):
        sequence_of(engine).reset()
        stream = engine.stream(PROMPT, max_tokens=50, **HOW)
        assert [next(stream).token_ids[0] for _ in range(read)] == cold[0][:read]
        stand_in.set(fail_encoder=1)
        with pytest.raises(DeviceError, match="no command buffer"):
            list(stream)
        stand_in.set(fail_encoder=0)
        assert is_as_cold(engine, cold)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_no_memory_for_a_larger_cache(cold, stand_in, nth):
    """Of K, V and history the n-th cannot be had: before a long prompt, and in the middle of a reply."""
    with policy(**SMALL):
        engine = open_engine(tiny_model(), max_context=256)
    with engine:
        assert outcome(engine, ask(engine)) == cold
        longer = [*PROMPT, *PROMPT]
        stand_in.set(fail_buffer=nth)
        with pytest.raises(DeviceError, match="refused a buffer"):
            ask(engine, longer)
        stand_in.set(fail_buffer=0)
        assert is_as_cold(engine, cold)

        stream = engine.stream(PROMPT, max_tokens=50, **HOW)
        seen = [next(stream).token_ids[0] for _ in range(3)]
        stand_in.set(fail_buffer=nth)
        with pytest.raises(DeviceError, match="refused a buffer"):
            seen.extend(chunk.token_ids[0] for chunk in stream)
        stand_in.set(fail_buffer=0)
        assert len(seen) == 32 - len(PROMPT) + 1  # all that the cache held
        assert seen[:TOKENS] == cold[0]
        assert is_as_cold(engine, cold)
        assert ask(engine, longer, 2).completion_tokens == 2  # and now there is memory


def test_no_memory_for_a_score(engine, cold, stand_in):
    with policy(**SMALL):
        other = open_engine(tiny_model(), max_context=256)
    with other:
        stand_in.set(fail_buffer=2)
        with pytest.raises(DeviceError, match="refused a buffer"):
            other.score(PROMPT, top_k=2)
        stand_in.set(fail_buffer=0)
        assert other.score(PROMPT, top_k=2).logprobs.tobytes() == engine.score(PROMPT, top_k=2).logprobs.tobytes()
        assert is_as_cold(other, cold)


def test_an_engine_that_finds_no_memory_leaves_none_behind(device, stand_in):
    until(lambda: not stand_in.live.get("command buffer"), "the command buffers of other engines are gone")
    before = stand_in.live
    for nth in (1, 4, 9, 15):
        stand_in.set(fail_buffer=nth)
        with pytest.raises(LilyError, match="refused a buffer"):
            open_engine(tiny_model(), max_context=256)
        stand_in.set(fail_buffer=0)
        assert stand_in.live == before


# ---- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", range(TOKENS + 2))
def test_a_reply_that_is_cancelled_at_any_token(engine, cold, stand_in, read):
    sequence_of(engine).reset()
    stand_in.set(order=2, seed=read)
    stream = engine.stream(PROMPT, max_tokens=50, **HOW)
    seen = [next(stream).token_ids[0] for _ in range(read)]
    stream.close()
    assert seen[:TOKENS] == cold[0][:read]
    assert is_as_cold(engine, cold)


def test_closing_waits_for_a_chunk_that_nobody_waits_for_any_more(device, stand_in, monkeypatch):
    """Ctrl-C between the submission of a chunk and its end; the stand-in tells of buffers that go while in use."""
    with policy(**SMALL):
        engine = open_engine(tiny_model(), max_context=256)

    def interrupted(ticket: int, timeout: float | None = None) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    stand_in.set(delay_us=200_000)
    monkeypatch.setattr(engine._device, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(engine)
    engine.close()


def test_ctrl_c_breaks_into_a_chunk(engine, cold, stand_in, monkeypatch):
    wait, waiting = engine._device.wait, threading.Event()

    def noticed(ticket: int, timeout: float | None = None) -> bool:
        waiting.set()
        return wait(ticket, timeout)

    def interrupt() -> None:
        waiting.wait(PATIENCE)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine._device, "wait", noticed)
    thread = threading.Thread(target=interrupt)
    with stand_in.held() as still_held:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ask(engine)
        assert still_held(), "the interrupt was noticed only when the chunk had ended"
    thread.join()
    monkeypatch.undo()
    assert is_as_cold(engine, cold)
