# SPDX-License-Identifier: Apache-2.0
"""On the cpu device results are bit-identical however the work is cut, and whatever is reused from earlier requests.

Nothing here has a tolerance. Logits, recurrent and convolution state and the KV rows in use are compared as bytes.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_harness import (
    GREEDY,
    TINY,
    Array,
    current_logits,
    current_state,
    forced_logits,
    isa_paths,
    open_engine,
    runner_of,
)

from lily.engine import Completion, Engine
from lily.errors import DeviceError
from lily.policy import POLICIES

LENGTH = 560  # beyond the largest bucket (512) and two pieces of decode attention (256)
TEXT_IDS = 960  # ids below are text in the tokenizer of random-tiny
EDGES = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, TEXT_IDS, count)]


@contextlib.contextmanager
def small_steps(**changes: Any) -> Iterator[None]:
    """The cpu policy with tiny growth steps and chunks, so that short texts cross their edges."""
    kept = POLICIES["cpu"]
    POLICIES["cpu"] = replace(kept, **{"kv_step": 8, "chunk": 16, "buckets": (8, 16), **changes})
    try:
        yield
    finally:
        POLICIES["cpu"] = kept


def run_cut(engine: Engine, tokens: Sequence[int], cuts: Sequence[int]) -> tuple[bytes, bytes]:
    """(logits after the last token, state) of a prompt run in chunks with edges at `cuts`."""
    logits = forced_logits(engine, tokens, len(tokens), cuts)
    return logits.tobytes(), current_state(engine)


# ---- chunks, splits, threads, paths ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepper() -> Iterator[Engine]:
    with open_engine(TINY, ablate=["handoff"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoded(stepper: Engine) -> tuple[Array, bytes]:
    """(logits of every position, state) when each token but the first goes through a decode step."""
    return forced_logits(stepper, random_tokens(LENGTH), 1), current_state(stepper)


@pytest.mark.parametrize("size", [1, 3, *EDGES])
def test_every_chunk_size_gives_the_bits_of_single_steps(stepper, decoded, size):
    logits, state = run_cut(stepper, random_tokens(LENGTH), range(0, LENGTH, size))
    assert logits == decoded[0][-1:].tobytes()
    assert state == decoded[1]


@pytest.mark.full
def test_all_chunk_sizes_give_the_bits_of_single_steps(stepper, decoded):
    for size in range(1, 513):
        logits, state = run_cut(stepper, random_tokens(LENGTH), range(0, LENGTH, size))
        assert logits == decoded[0][-1:].tobytes(), size
        assert state == decoded[1], size


@pytest.mark.parametrize("seed", range(10))
def test_random_cuts_give_the_bits_of_single_steps(stepper, decoded, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 25))
    cuts = sorted({int(c) for c in rng.integers(1, LENGTH, count)} | {48})  # no chunk above 512 rows
    logits, state = run_cut(stepper, random_tokens(LENGTH), cuts)
    assert logits == decoded[0][-1:].tobytes()
    assert state == decoded[1]


@pytest.mark.parametrize("split", [1, 2, 3, *EDGES])
def test_every_split_into_prefill_and_decode_gives_the_same_bits(stepper, decoded, split):
    end = min(LENGTH, split + 12)
    got = forced_logits(stepper, random_tokens(LENGTH)[:end], split)
    assert got.tobytes() == decoded[0][split - 1 : end].tobytes()


def test_logits_depend_on_every_token_before(stepper, decoded):
    """The comparisons above would also hold for a model that looks at nothing: it looks back to the first token."""
    tokens = random_tokens(LENGTH)
    logits, state = run_cut(stepper, [(tokens[0] + 1) % TEXT_IDS, *tokens[1:]], [48])
    assert logits != decoded[0][-1:].tobytes()
    assert state != decoded[1]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_thread_count_does_not_change_a_bit(decoded, threads):
    tokens = random_tokens(LENGTH)
    with open_engine(TINY, threads=threads, ablate=["handoff"]) as engine:
        assert engine.info["device"]["threads"] == threads
        got = forced_logits(engine, tokens, 500, [37])
        assert got.tobytes() == decoded[0][499:].tobytes()
        assert current_state(engine) == decoded[1]


@pytest.mark.parametrize("isa", isa_paths()[1:])
def test_chunks_and_splits_on_the_other_instruction_sets(isa):
    tokens = random_tokens(300)
    with open_engine(TINY, isa, ablate=["handoff"]) as engine:
        assert engine.info["device"]["isa"] == isa
        steps = forced_logits(engine, tokens, 1)
        state = current_state(engine)
        for cuts in ([], [1], [8, 17, 150], range(0, 300, 33)):
            assert run_cut(engine, tokens, cuts) == (steps[-1:].tobytes(), state)
        assert forced_logits(engine, tokens, 64, [31]).tobytes() == steps[63:].tobytes()


@pytest.mark.parametrize("ablate", [["overlap"], ["gdn-fusion"]])
def test_switching_a_mechanism_off_does_not_change_a_bit(decoded, ablate):
    tokens = random_tokens(LENGTH)[:80]
    with open_engine(TINY, ablate=[*ablate, "handoff"]) as engine:
        assert forced_logits(engine, tokens, 40).tobytes() == decoded[0][39:80].tobytes()


# ---- resumed = cold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cold_engine() -> Iterator[Engine]:
    with open_engine(TINY, max_context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm_engine() -> Iterator[Engine]:
    with open_engine(TINY, max_context=2048) as engine:
        yield engine


@pytest.fixture
def warm(warm_engine: Engine) -> Engine:
    """An engine that has just run something else."""
    runner_of(warm_engine).reset()
    warm_engine.generate(random_tokens(40, 99), max_tokens=5, seed=1)
    return warm_engine


def ask(engine: Engine, prompt: Sequence[int], tokens: int = 10, **sampling: Any) -> Completion:
    return engine.generate(prompt, **{"max_tokens": tokens, "logprobs": 5, "seed": 7, "ignore_eos": True, **sampling})


def outcome(engine: Engine, reply: Completion) -> tuple[Any, ...]:
    """All that must not depend on what was reused; log-probabilities compare exactly."""
    return reply.text, reply.token_ids, reply.finish_reason, reply.logprobs, current_logits(engine).tobytes()


def check(warm: Engine, cold: Engine, prompt: Sequence[int], *, cached: int | None = None, **how: Any) -> Completion:
    """Asks both engines and compares; `cached`: the number of tokens that must have been reused, at least."""
    runner_of(cold).reset()
    want = ask(cold, prompt, **how)
    assert want.cached_tokens == 0
    got = ask(warm, prompt, **how)
    assert outcome(warm, got) == outcome(cold, want)
    assert current_state(warm) == current_state(cold)
    if cached is not None:
        assert cached <= got.cached_tokens < len(prompt)
    return got


def test_same_prompt_twice(warm, cold_engine):
    prompt = random_tokens(600)
    check(warm, cold_engine, prompt)
    check(warm, cold_engine, prompt, cached=599)


def test_one_token_prompt_twice(warm, cold_engine):
    check(warm, cold_engine, [5])
    check(warm, cold_engine, [5], cached=0)
    check(warm, cold_engine, [6], cached=0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 100, 511, 512, 513])
def test_prompt_extended_by_its_reply_and_more(warm, cold_engine, length):
    first = random_tokens(length)
    reply = check(warm, cold_engine, first).token_ids
    longer = first + reply + random_tokens(20, 1)
    check(warm, cold_engine, longer, cached=len(first) + len(reply) - 1)


@pytest.mark.parametrize("keep", [9, 8, 7, 1, 0])
def test_reply_that_is_only_partly_continued(warm, cold_engine, keep):
    """The next prompt departs inside the reply. Two points of a reply can be resumed: its end and one step before.

    Beside these there is the prompt's last token but one.
    """
    first = random_tokens(50)
    reply = check(warm, cold_engine, first).token_ids
    departed = [*first, *reply[:keep], (reply[keep] + 1) % TEXT_IDS]
    got = check(warm, cold_engine, departed)
    assert got.cached_tokens == (50 + keep if keep >= 8 else 49)


@pytest.mark.parametrize("read", [1, 2, 3, 6])
def test_cancelled_reply_that_is_only_partly_continued(warm, cold_engine, read):
    """As above, when one step ran beyond what was read."""
    first = random_tokens(50)
    reply = check(warm, cold_engine, first).token_ids
    for keep in (read, read - 1, read - 2):
        if keep < 0:
            continue
        runner_of(warm).reset()
        stream = warm.stream(first, max_tokens=20, seed=7, ignore_eos=True)
        assert [next(stream).token_ids[0] for _ in range(read)] == reply[:read]
        stream.close()
        departed = [*first, *reply[:keep], (reply[keep] + 1) % TEXT_IDS]
        got = check(warm, cold_engine, departed)
        assert got.cached_tokens == (50 + keep if keep >= read - 1 else 49)


def test_regenerating_a_reply(warm, cold_engine):
    prompt = random_tokens(1100)
    check(warm, cold_engine, prompt)
    for seed in (1, 2):
        check(warm, cold_engine, prompt, cached=1099, seed=seed)


def test_edited_last_message(warm, cold_engine):
    """Message starts are points to come back to."""
    start = warm.tokenizer.id_of("<|im_start|>")
    history = [start, *random_tokens(30), start, *random_tokens(40, 1)]
    check(warm, cold_engine, [*history, start, *random_tokens(25, 2)])
    for seed in (3, 4):
        check(warm, cold_engine, [*history, start, *random_tokens(25, seed)], cached=len(history))


def test_branches_a_b_a_with_interleaved_writes(warm, cold_engine):
    start = warm.tokenizer.id_of("<|im_start|>")
    trunk = [start, *random_tokens(60)]
    branch = {name: [*trunk, start, *random_tokens(70, seed)] for seed, name in enumerate("ABC", 1)}
    for name in "ABACBA":
        reply = check(warm, cold_engine, branch[name], cached=None)
        branch[name] += [*reply.token_ids, start, *random_tokens(5, len(branch[name]))]


def test_shorter_prompt_after_a_longer_one(warm, cold_engine):
    tokens = random_tokens(700)
    check(warm, cold_engine, tokens)
    check(warm, cold_engine, tokens[:600], cached=512)
    check(warm, cold_engine, tokens[:513], cached=512)
    check(warm, cold_engine, tokens[:512], cached=0)


def test_score_leaves_nothing_that_could_mislead(warm, cold_engine):
    tokens = random_tokens(90)
    warm.score(tokens)
    check(warm, cold_engine, tokens[:60])
    warm.score(tokens)
    check(warm, cold_engine, tokens + random_tokens(9, 3), cached=len(tokens) - 1)


@pytest.mark.parametrize("read", range(7))
def test_after_a_cancelled_reply(warm, cold_engine, read):
    """Up to two steps are in flight when the reader goes: they count neither as text nor as state to build on."""
    prompt = random_tokens(30)
    whole = ask(cold_engine, prompt).token_ids
    stream = warm.stream(prompt, max_tokens=20, seed=7, logprobs=5, ignore_eos=True)
    seen = [token for _ in range(read) for token in next(stream).token_ids]
    stream.close()
    assert seen == whole[:read]
    for keep in (read + 2, read + 1, read, max(read - 1, 0), 0):
        check(warm, cold_engine, prompt + whole[:keep] + random_tokens(4, keep))


def test_after_a_stop_id_and_a_stop_string(warm, cold_engine):
    prompt = random_tokens(30)
    whole = ask(cold_engine, prompt, 20)
    for at in (0, 1, 5):
        stop = [whole.token_ids[at]]
        reply = check(warm, cold_engine, prompt, stop_token_ids=stop, tokens=20)
        assert reply.finish_reason == "stop"
        check(warm, cold_engine, prompt + reply.token_ids + random_tokens(9, at))
    for length in (1, 2, 3):
        stop_text = whole.text[4 : 4 + length]
        reply = check(warm, cold_engine, prompt, stop=[stop_text], tokens=20)
        assert reply.finish_reason == "stop"
        check(warm, cold_engine, prompt + reply.token_ids + random_tokens(9, length))


@pytest.mark.parametrize("failing_call", [0, 1])
def test_failed_chunk_leaves_the_sequence_as_it_was(warm, cold_engine, monkeypatch, failing_call):
    """A chunk that fails half way has written rubbish into its output slot and its KV rows."""
    tokens = random_tokens(1200)
    check(warm, cold_engine, tokens[:100])
    r, calls = runner_of(warm), iter(range(10))
    wait = r.device.wait

    def failing(ticket: int, timeout: float | None = None) -> bool:
        done = wait(ticket, timeout)
        if next(calls) != failing_call:
            return done
        r._state()[:] = 0x3F
        raise DeviceError("injected")

    monkeypatch.setattr(r.device, "wait", failing)
    with pytest.raises(DeviceError, match="injected"):
        warm.generate(tokens, max_tokens=3)
    monkeypatch.setattr(r.device, "wait", wait)
    check(warm, cold_engine, tokens)
    check(warm, cold_engine, tokens[:100] + random_tokens(5, 4))


def test_interrupts_at_any_moment(warm, cold_engine):
    """As Ctrl-C does it: an exception out of nowhere, in the prompt, in a step, or between two steps."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    rng, prompt = np.random.default_rng(1), random_tokens(600)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for step in range(20):
            stopped = False
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.001, 0.06)))
            try:
                warm.generate(prompt[: int(rng.integers(1, 600))], max_tokens=1400, seed=step, ignore_eos=True)
            except KeyboardInterrupt:
                stopped = True
            assert stopped
            check(warm, cold_engine, prompt[: int(rng.integers(1, 60))], tokens=3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", ["step", "chunk", "start"])
def test_interrupt_in_the_middle_of_the_bookkeeping(warm, cold_engine, monkeypatch, place):
    """The moments that chance does not hit: a step half noted, a chunk that runs and nobody waits for."""
    prompt, r = random_tokens(600), runner_of(warm)
    reply = ask(cold_engine, prompt).token_ids
    submit, calls = r._submit_chunk, iter(range(100))

    def torn_step() -> None:
        r.tokens.append(r._last)
        if next(calls) == 3:
            raise KeyboardInterrupt
        r._previous = len(r.tokens) - 1
        r._slot ^= 1

    def torn_chunk(*arguments: Any) -> int:
        ticket = submit(*arguments)
        if next(calls) == (0 if place == "chunk" else 1):
            raise KeyboardInterrupt
        return ticket

    monkeypatch.setattr(r, *(("_consumed", torn_step) if place == "step" else ("_submit_chunk", torn_chunk)))
    with pytest.raises(KeyboardInterrupt):
        ask(warm, prompt)
    monkeypatch.undo()
    check(warm, cold_engine, [*prompt, *reply] if place == "step" else random_tokens(40, 5))
    check(warm, cold_engine, prompt)


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_of_requests(seed):
    """Prompts grow out of earlier ones at random places; replies end in every way. Each equals a cold run."""
    rng = np.random.default_rng(seed)
    with small_steps():
        warm, cold = (open_engine(TINY, max_context=120) for _ in range(2))
    start, reused = warm.tokenizer.id_of("<|im_start|>"), 0
    known = [random_tokens(5, seed)]
    with warm, cold:
        for step in range(25):
            base = known[rng.integers(max(0, len(known) - 3), len(known))]
            keep = int(rng.integers(1, len(base) + 1)) if rng.random() < 0.5 else len(base)
            opening = [start] if rng.random() < 0.4 else []
            prompt = (base[:keep] + opening + random_tokens(int(rng.integers(0, 12)), step))[:110]
            if rng.random() < 0.3:
                stream = warm.stream(prompt, max_tokens=30, seed=step)
                for _ in range(int(rng.integers(0, 6))):
                    next(stream, None)
                stream.close()
            how = {"tokens": int(rng.integers(1, 40)), "seed": step, "repetition_penalty": float(rng.choice([1, 1.3]))}
            if rng.random() < 0.3:
                how["stop_token_ids"] = [int(t) for t in rng.integers(0, TEXT_IDS, 20)]
            reply = check(warm, cold, prompt, **how)
            reused += reply.cached_tokens
            known.append(prompt + reply.token_ids)
    assert reused > 200


# ---- growth and the end of the context ------------------------------------------------------------------------------


def test_growth_of_the_cache_in_the_middle_of_a_reply(cold_engine):
    """With growth steps of 8 tokens a reply of 100 passes a dozen of them, two steps in flight."""
    prompt = random_tokens(13)
    runner_of(cold_engine).reset()
    penalties = {"repetition_penalty": 1.2, "repetition_window": 50, "frequency_penalty": 0.3}
    want = ask(cold_engine, prompt, 100, **penalties)
    with small_steps(), open_engine(TINY, max_context=2048) as engine:
        got = ask(engine, prompt, 100, **penalties)
        assert runner_of(engine).capacity == 112  # 14 steps of 8
        assert outcome(engine, got) == outcome(cold_engine, want)
        assert current_state(engine) == current_state(cold_engine)
        check(engine, cold_engine, prompt + got.token_ids, cached=100)


@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 39])
@pytest.mark.parametrize("step", [8, 1024])
def test_context_exactly_full(cold_engine, prompt_tokens, step):
    prompt = random_tokens(prompt_tokens)
    runner_of(cold_engine).reset()
    want = ask(cold_engine, prompt, 40 - prompt_tokens)
    with small_steps(kv_step=step), open_engine(TINY, max_context=40) as engine:
        for _ in range(2):
            got = ask(engine, prompt, 1000)
            assert got.completion_tokens == 40 - prompt_tokens
            assert got.finish_reason == "length"
            assert outcome(engine, got) == outcome(cold_engine, want)
        check(engine, cold_engine, (prompt + got.token_ids)[:39], cached=38 - 1 if prompt_tokens < 39 else 0, tokens=1)


def test_two_steps_in_flight_give_what_one_gives(cold_engine):
    prompt = random_tokens(20)
    runner_of(cold_engine).reset()
    want = ask(cold_engine, prompt, 60)
    with open_engine(TINY, ablate=["handoff"]) as engine:
        assert outcome(engine, ask(engine, prompt, 60)) == outcome(cold_engine, want)
        assert current_state(engine) == current_state(cold_engine)


def test_greedy_reply_follows_the_largest_logit_of_every_step(stepper, cold_engine):
    prompt = random_tokens(20)
    reply = ask(cold_engine, prompt, 30, temperature=0).token_ids
    logits = forced_logits(stepper, prompt + reply, len(prompt))[:-1, : cold_engine.tokenizer.num_tokens]
    assert reply == logits.argmax(1).tolist()
    assert GREEDY.greedy
