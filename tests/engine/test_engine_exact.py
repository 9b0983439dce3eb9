# SPDX-License-Identifier: Apache-2.0
"""A resumed run is bit-identical to a cold one on every device, and on the cpu also however the work is cut.

Logits, recurrent and convolution state and the KV rows in use are compared as bytes.  Only where work is cut in other
places and a device promises the same bits for the same places alone, logits are compared up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_device import Target, cpu_only, current, isa_paths, sweep
from engine_harness import (
    GREEDY,
    Array,
    assert_same_logits,
    current_logits,
    current_state,
    forced_logits,
    open_engine,
    policy,
    runner_of,
    sequence_of,
)
from models import all_experts, tiny_model

from lily import structs
from lily.device.device import EFAILED, OK, CommandList, Device
from lily.engine import Completion, Engine
from lily.errors import DeviceError
from lily.kernels import OUTPUT_RING
from lily.run import reply as reply_module
from lily.run._submit import DecodePipeline
from lily.run.reply import Reply

TEXT_IDS = 960  # ids below are text in the tokenizer of random-tiny
EDGES = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512)
# Chunks of which a text of a few holds in the context of random-tiny, and in a test.
GRID = {"chunks": ((0, 512),)}
EMULATED_GRID = {"chunks": ((0, 32),), "buckets": (8, 32), "message_gap": 1}


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, TEXT_IDS, count)]


def small_steps(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Tiny growth steps and chunks, so that short texts cross their edges."""
    return policy(**{"kv_step": 8, "chunks": ((0, 16),), "buckets": (8, 16), "message_gap": 1, **changes})


def run_cut(engine: Engine, tokens: Sequence[int], cuts: Sequence[int]) -> tuple[bytes, bytes]:
    """(logits after the last token, state) of a prompt run in chunks with edges at ``cuts``."""
    logits = forced_logits(engine, tokens, len(tokens), cuts)
    return logits.tobytes(), current_state(engine)


# ---- chunks, splits, threads, paths ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def length(device: Target) -> int:
    """Tokens of a text beyond the largest bucket (512) and two splits of decode attention (256)."""
    return device.pick(560, 50)


@pytest.fixture(scope="module")
def stepper(device: Target) -> Iterator[Engine]:
    with open_engine(tiny_model(), ablate=["handoff"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def cuttable(device: Target, stepper: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same where cuts change no bit; elsewhere a model of which rounding changes no choice."""
    if device.exact:
        yield stepper
        return
    with open_engine(all_experts(tmp_path_factory.mktemp("all") / "m"), ablate=["handoff"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoded(cuttable: Engine, length: int) -> tuple[Array, bytes]:
    """(logits of every position, state) when each token but the first goes through a decode step."""
    return forced_logits(cuttable, random_tokens(length), 1), current_state(cuttable)


def check_cut(engine: Engine, decoded: tuple[Array, bytes], tokens: Sequence[int], cuts: Sequence[int]) -> None:
    """A prompt run in chunks with edges at ``cuts`` against the same in single steps."""
    assert_same_logits(forced_logits(engine, tokens, len(tokens), cuts), decoded[0][-1:])
    if current().exact:
        assert current_state(engine) == decoded[1]


@pytest.mark.parametrize("size", sweep([1, 3, *EDGES], 8, 33))
def test_every_chunk_size_gives_what_single_steps_give(cuttable, decoded, length, size):
    check_cut(cuttable, decoded, random_tokens(length), range(0, length, size))


@pytest.mark.full
@cpu_only("other devices do not promise it, and the sizes at the edges are enough for closeness")
def test_all_chunk_sizes_give_what_single_steps_give(cuttable, decoded, length):
    for size in range(1, 513):
        check_cut(cuttable, decoded, random_tokens(length), range(0, length, size))


@pytest.mark.parametrize("seed", sweep(range(10), 1))
def test_random_cuts_give_what_single_steps_give(cuttable, decoded, length, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 25))
    cuts = sorted({int(c) for c in rng.integers(1, length, count)} | {48})  # no chunk above 512 rows
    check_cut(cuttable, decoded, random_tokens(length), cuts)


@pytest.mark.parametrize("split", sweep([1, 2, 3, *EDGES], 1, 33))
def test_every_split_into_prefill_and_decode_gives_the_same(cuttable, decoded, length, split):
    split = min(split, length - 8)
    end = min(length, split + 12)
    got = forced_logits(cuttable, random_tokens(length)[:end], split)
    assert_same_logits(got, decoded[0][split - 1 : end])


def test_the_same_cuts_give_the_same_bits(stepper, device):
    """On every device, and after whatever ran before."""
    tokens = random_tokens(device.pick(100, 30))
    first, _, again = [run_cut(stepper, tokens, cuts) for cuts in ([17, 25], [9], [17, 25])]
    assert again == first
    steps = [forced_logits(stepper, tokens, len(tokens) - 5, [17]).tobytes() for _ in range(2)]
    assert steps[0] == steps[1]


def test_logits_depend_on_every_token_before(cuttable, decoded, length):
    """The comparisons above would also hold for a model that looks at nothing: it looks back to the first token."""
    tokens = random_tokens(length)
    changed = [(tokens[0] + 1) % TEXT_IDS, *tokens[1:]]
    logits, state = run_cut(cuttable, changed, [48])
    assert logits != decoded[0][-1:].tobytes()
    assert state != decoded[1]
    with pytest.raises(AssertionError):
        assert_same_logits(forced_logits(cuttable, changed, length, [48]), decoded[0][-1:])


@cpu_only("threads are the cpu device's")
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_thread_count_does_not_change_a_bit(decoded, length, threads):
    tokens = random_tokens(length)
    with open_engine(tiny_model(), threads=threads, ablate=["handoff"]) as engine:
        assert engine.info["device"]["threads"] == threads
        got = forced_logits(engine, tokens, 500, [37])
        assert got.tobytes() == decoded[0][499:].tobytes()
        assert current_state(engine) == decoded[1]


@pytest.mark.parametrize("device", [Target("cpu", isa) for isa in isa_paths()[1:]], ids=str, indirect=True)
def test_chunks_and_splits_on_the_other_instruction_sets(device):
    tokens = random_tokens(300)
    with open_engine(tiny_model(), ablate=["handoff"]) as engine:
        assert engine.info["device"]["isa"] == device.isa
        steps = forced_logits(engine, tokens, 1)
        state = current_state(engine)
        for cuts in ([], [1], [8, 17, 150], range(0, 300, 33)):
            assert run_cut(engine, tokens, cuts) == (steps[-1:].tobytes(), state)
        assert forced_logits(engine, tokens, 64, [31]).tobytes() == steps[63:].tobytes()


# ---- resumed = cold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(device: Target) -> int:
    """Chunk edges lie on multiples of it: states are kept there on all devices, and at the starts of messages."""
    return device.pick(512, 32)


def engine_on_the_grid(device: Target) -> Engine:
    with policy(**device.pick(GRID, EMULATED_GRID)):
        return open_engine(tiny_model(), max_context=2048)


@pytest.fixture(scope="module")
def cold_engine(device: Target) -> Iterator[Engine]:
    with engine_on_the_grid(device) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm_engine(device: Target) -> Iterator[Engine]:
    with engine_on_the_grid(device) as engine:
        yield engine


@pytest.fixture
def warm(warm_engine: Engine) -> Engine:
    """An engine that has just run something else."""
    sequence_of(warm_engine).reset()
    warm_engine.generate(random_tokens(current().pick(40, 10), 99), max_tokens=current().pick(5, 3), seed=1)
    return warm_engine


def ask(engine: Engine, prompt: Sequence[int], tokens: int | None = None, **sampling: Any) -> Completion:
    how = {"max_tokens": tokens or current().pick(10, 4), "logprobs": 5, "seed": 7, "ignore_eos": True}
    return engine.generate(prompt, **{**how, **sampling})


def outcome(engine: Engine, reply: Completion) -> tuple[Any, ...]:
    """All that must not depend on what was reused; log-probabilities compare exactly."""
    return reply.text, reply.token_ids, reply.finish_reason, reply.logprobs, current_logits(engine).tobytes()


def check(
    warm: Engine, cold: Engine, prompt: Sequence[int], *, cached: int | None = None, edge: int | None = None, **how: Any
) -> Completion:
    """Asks both engines and compares.

    ``cached``: the number of tokens that must have been reused, at least, where any point can be resumed; ``edge``: the
    number where only edges of chunks can be.
    """
    sequence_of(cold).reset()
    want = ask(cold, prompt, **how)
    assert want.cached_tokens == 0
    got = ask(warm, prompt, **how)
    assert outcome(warm, got) == outcome(cold, want)
    assert current_state(warm) == current_state(cold)
    if not current().exact:
        cached = edge
    if cached is not None:
        assert cached <= got.cached_tokens < len(prompt)
    return got


def test_same_prompt_twice(warm, cold_engine, grid):
    prompt = random_tokens(grid + grid // 6)
    check(warm, cold_engine, prompt)
    check(warm, cold_engine, prompt, cached=len(prompt) - 1, edge=grid)


def test_one_token_prompt_twice(warm, cold_engine):
    check(warm, cold_engine, [5])
    check(warm, cold_engine, [5], cached=0)
    check(warm, cold_engine, [6], cached=0)


@pytest.mark.parametrize(
    ("grids", "more"),
    sweep([(0, 1), (0, 2), (0, 7), (0, 8), (0, 9), (0, 100), (1, -1), (1, 0), (1, 1)], (0, 1), (1, 0), (1, 1)),
)
def test_prompt_extended_by_its_reply_and_more(warm, cold_engine, grid, grids, more):
    first = random_tokens(grids * grid + more)
    reply = check(warm, cold_engine, first).token_ids
    longer = first + reply + random_tokens(20, 1)
    kept = (len(first) - 1) // grid * grid
    check(warm, cold_engine, longer, cached=len(first) + len(reply) - 1, edge=kept)


@pytest.mark.parametrize("lost", sweep([1, 2, 3, 9, 10], 1, 3))
def test_reply_that_is_only_partly_continued(warm, cold_engine, device, lost):
    """The next prompt departs inside the reply. Two points of a reply can be resumed: its end and one step before.

    Beside these there is the prompt's last token but one.
    """
    first = random_tokens(device.pick(50, 12))
    reply = check(warm, cold_engine, first, tokens=10).token_ids
    keep = 10 - lost
    departed = [*first, *reply[:keep], (reply[keep] + 1) % TEXT_IDS]
    got = check(warm, cold_engine, departed)
    if device.exact:
        assert got.cached_tokens == (len(first) + keep if keep >= 8 else len(first) - 1)


@cpu_only("elsewhere only edges of chunks can be resumed")
def test_one_token_reply_between_two_departures(warm, cold_engine):
    """A reply of one token runs no step: the other slot then holds what was before the prompt's last chunk."""
    first = random_tokens(20)
    reply = check(warm, cold_engine, first, tokens=6).token_ids
    longer, at = [*first, *reply, *random_tokens(6, 3)], len(first) + len(reply) - 1
    for keep in range(at + 1, at - 4, -1):
        sequence_of(warm).reset()
        check(warm, cold_engine, first, tokens=6)
        check(warm, cold_engine, longer, tokens=1)
        check(warm, cold_engine, [*longer[:keep], (longer[keep] + 1) % TEXT_IDS, 7])


@pytest.mark.parametrize("read", sweep([1, 2, 3, 6], 2))
def test_cancelled_reply_that_is_only_partly_continued(warm, cold_engine, device, read):
    """As above, when one step ran beyond what was read."""
    first = random_tokens(device.pick(50, 12))
    reply = check(warm, cold_engine, first, tokens=read + 1).token_ids
    for keep in (read, read - 1, read - 2):
        if keep < 0:
            continue
        sequence_of(warm).reset()
        stream = warm.stream(first, max_tokens=20, seed=7, ignore_eos=True)
        assert [next(stream).token_ids[0] for _ in range(read)] == reply[:read]
        stream.close()
        departed = [*first, *reply[:keep], (reply[keep] + 1) % TEXT_IDS]
        got = check(warm, cold_engine, departed)
        if device.exact:  # at the latest: how far the device came is not known
            assert got.cached_tokens >= len(first) - 1


def test_regenerating_a_reply(warm, cold_engine, device, grid):
    prompt = random_tokens(2 * grid + grid // 7)
    check(warm, cold_engine, prompt)
    for seed in device.pick((1, 2), (1,)):
        check(warm, cold_engine, prompt, cached=len(prompt) - 1, edge=2 * grid, seed=seed)


def test_edited_last_message(warm, cold_engine, device):
    """Message starts are points to come back to."""
    start = warm.tokenizer.id_of("<|im_start|>")
    lengths = device.pick((30, 40, 25), (8, 12, 9))
    history = [start, *random_tokens(lengths[0]), start, *random_tokens(lengths[1], 1)]
    check(warm, cold_engine, [*history, start, *random_tokens(lengths[2], 2)])
    for seed in device.pick((3, 4), (3,)):
        prompt = [*history, start, *random_tokens(lengths[2], seed)]
        check(warm, cold_engine, prompt, cached=len(history), edge=len(history))


def test_branches_a_b_a_with_interleaved_writes(warm, cold_engine, device):
    start = warm.tokenizer.id_of("<|im_start|>")
    trunk = [start, *random_tokens(device.pick(60, 12))]
    length = device.pick(70, 10)
    branch = {name: [*trunk, start, *random_tokens(length, seed)] for seed, name in enumerate("ABC", 1)}
    for name in device.pick("ABACBA", "ABAB"):
        reply = check(warm, cold_engine, branch[name])
        branch[name] += [*reply.token_ids, start, *random_tokens(5, len(branch[name]))]


def test_shorter_prompt_after_a_longer_one(warm, cold_engine, grid):
    tokens = random_tokens(grid + grid // 3)
    check(warm, cold_engine, tokens)
    for length, kept in ((grid + grid // 6, grid), (grid + 1, grid), (grid, 0)):
        check(warm, cold_engine, tokens[:length], cached=kept, edge=kept)


def test_score_leaves_nothing_that_could_mislead(warm, cold_engine, device):
    tokens = random_tokens(device.pick(90, 40))
    warm.score(tokens)
    check(warm, cold_engine, tokens[: len(tokens) * 2 // 3])
    warm.score(tokens)
    check(warm, cold_engine, tokens + random_tokens(9, 3), cached=len(tokens) - 1)


@pytest.mark.parametrize("read", sweep(range(7), 0, 2))
def test_after_a_cancelled_reply(warm, cold_engine, device, read):
    """Up to two steps are in flight when the reader goes: they count neither as text nor as state to build on."""
    prompt = random_tokens(device.pick(30, 12))
    whole = ask(cold_engine, prompt, 10).token_ids
    stream = warm.stream(prompt, max_tokens=20, seed=7, logprobs=5, ignore_eos=True)
    seen = [token for _ in range(read) for token in next(stream).token_ids]
    stream.close()
    assert seen == whole[:read]
    for keep in device.pick((read + 2, read + 1, read, max(read - 1, 0), 0), (read + 1, 0)):
        check(warm, cold_engine, prompt + whole[:keep] + random_tokens(4, keep))


def test_after_a_stop_id_and_a_stop_string(warm, cold_engine, device):
    prompt = random_tokens(device.pick(30, 8))
    whole = ask(cold_engine, prompt, 20)
    for at in device.pick((0, 1, 5), (0, 5)):
        stop = [whole.token_ids[at]]
        reply = check(warm, cold_engine, prompt, stop_token_ids=stop, tokens=20)
        assert reply.finish_reason == "stop"
        check(warm, cold_engine, prompt + reply.token_ids + random_tokens(9, at))
    for length in device.pick((1, 2, 3), (2,)):
        stop_text = whole.text[4 : 4 + length]
        reply = check(warm, cold_engine, prompt, stop=[stop_text], tokens=20)
        assert reply.finish_reason == "stop"
        check(warm, cold_engine, prompt + reply.token_ids + random_tokens(9, length))


@pytest.mark.parametrize("failing_call", [0, 1])
def test_failed_chunk_leaves_the_sequence_as_it_was(warm, cold_engine, grid, monkeypatch, failing_call):
    """A chunk that fails half way has written rubbish into its output slot and its KV rows."""
    tokens = random_tokens(2 * grid + grid // 3)
    check(warm, cold_engine, tokens[: grid // 5])
    r, calls = runner_of(warm), iter(range(10))
    device = r.device

    class Failing:
        """The device as the runner alone sees it: what the recorder waits for is no chunk."""

        def __getattr__(self, name: str) -> Any:
            return getattr(device, name)

        def wait(self, ticket: int, timeout: float | None = None) -> bool:
            done = device.wait(ticket, timeout)
            if next(calls) != failing_call:
                return done
            sequence_of(warm)._state.fill(0x3F)
            raise DeviceError("injected")

    monkeypatch.setattr(r, "device", Failing())
    with pytest.raises(DeviceError, match="injected"):
        warm.generate(tokens, max_tokens=3)
    monkeypatch.setattr(r, "device", device)
    check(warm, cold_engine, tokens)
    check(warm, cold_engine, tokens[: grid // 5] + random_tokens(5, 4))


def test_interrupts_at_any_moment(warm, cold_engine, device):
    """As Ctrl-C does it: an exception out of nowhere, in the prompt, in a step, or between two steps."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    rng, prompt = np.random.default_rng(1), random_tokens(device.pick(600, 60))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for step in range(device.pick(20, 3)):
            stopped = False
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(*device.pick((0.001, 0.06), (0.05, 1.5)))))
            try:
                warm.generate(prompt[: int(rng.integers(1, len(prompt)))], max_tokens=1400, seed=step, ignore_eos=True)
            except KeyboardInterrupt:
                stopped = True
            assert stopped
            check(warm, cold_engine, prompt[: int(rng.integers(1, device.pick(60, 20)))], tokens=3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", ["step", "chunk", "start"])
def test_interrupt_in_the_middle_of_the_bookkeeping(warm, cold_engine, grid, monkeypatch, place):
    """The moments that chance does not hit: a step half noted, a chunk that runs and nobody waits for."""
    prompt, r, s = random_tokens(grid + grid // 6), runner_of(warm), sequence_of(warm)
    reply = ask(cold_engine, prompt, 10).token_ids
    submit, calls = r._submit, iter(range(100))

    def torn_step(reply: Reply) -> None:
        s.tokens.append(reply._last)
        if next(calls) == 3:
            raise KeyboardInterrupt
        s._previous = len(s.tokens) - 1
        s.slot ^= 1

    def torn_chunk(*arguments: Any) -> int:
        ticket = submit(*arguments)
        if next(calls) == (0 if place == "chunk" else 1):
            raise KeyboardInterrupt
        return ticket

    monkeypatch.setattr(*((Reply, "_consumed", torn_step) if place == "step" else (r, "_submit", torn_chunk)))
    with pytest.raises(KeyboardInterrupt):
        ask(warm, prompt, 10)
    monkeypatch.undo()
    check(warm, cold_engine, [*prompt, *reply] if place == "step" else random_tokens(40, 5))
    check(warm, cold_engine, prompt)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_interrupt_while_recorded_lists_are_given_back(warm, cold_engine, monkeypatch, nth):
    """A score makes room for its results, for which every recorded list goes."""
    prompt = random_tokens(30)
    ask(warm, prompt)
    free, calls = CommandList.free, iter(range(1, 1000))

    def interrupted(self: CommandList) -> None:
        free(self)
        if next(calls) == nth:
            raise KeyboardInterrupt

    sizes = {
        name: runner_of(warm).recorder.buffers.pop(name)
        for name in list(runner_of(warm).recorder.buffers)
        if name.startswith("score.")
    }
    for buffer in sizes.values():
        buffer.free()
    with monkeypatch.context() as patch:
        patch.setattr(CommandList, "free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm.score(prompt)
    for _ in range(2):
        check(warm, cold_engine, prompt)
    assert warm.score(prompt).logprobs.tobytes() == cold_engine.score(prompt).logprobs.tobytes()


@cpu_only("the stand-in for Metal fails by itself: test_engine_faults.py")
def test_a_step_that_fails_after_its_reader_has_gone(warm, cold_engine, monkeypatch):
    """Nobody sees the failure, so the next request must not go on from what the step left."""
    prompt, made = random_tokens(30), []

    def failing(device: Device, sequence: Sequence) -> DecodePipeline:
        wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        real = wait(device.function("lily_wait"))

        def wait_and_fail(handle: int, ticket: int, nanoseconds: int) -> int:
            code = real(handle, ticket, nanoseconds)
            if code == OK and closing:
                sequence_of(warm).buffers["state.A"].bytes[:] = 0x3F
                sequence_of(warm).buffers["state.B"].bytes[:] = 0x3F
                return EFAILED
            return code

        made.append(wait(wait_and_fail))
        address = ctypes.cast(made[-1], ctypes.c_void_p).value
        outputs = sequence.buffers["outputs"].address
        return DecodePipeline(
            device.handle, device.function("lily_submit"), address, outputs, structs.OUTPUT.itemsize, OUTPUT_RING
        )

    closing = False
    with monkeypatch.context() as patch:
        patch.setattr(reply_module, "_pipeline", failing)
        stream = warm.stream(prompt, max_tokens=50, temperature=0, ignore_eos=True)
        reply = [next(stream).token_ids[0] for _ in range(3)]
        closing = True
        stream.close()
    check(warm, cold_engine, [*prompt, *reply])


@pytest.mark.parametrize("seed", sweep(range(4), 0))
def test_random_walk_of_requests(device, seed):
    """Prompts grow out of earlier ones at random places; replies end in every way. Each equals a cold run."""
    rng = np.random.default_rng(seed)
    with small_steps():
        warm, cold = (open_engine(tiny_model(), max_context=120) for _ in range(2))
    start, reused = warm.tokenizer.id_of("<|im_start|>"), 0
    known = [random_tokens(5, seed)]
    with warm, cold:
        for step in range(device.pick(25, 12)):
            base = known[rng.integers(max(0, len(known) - 3), len(known))]
            keep = int(rng.integers(1, len(base) + 1)) if rng.random() < 0.5 else len(base)
            opening = [start] if rng.random() < 0.4 else []
            prompt = (base[:keep] + opening + random_tokens(int(rng.integers(0, 12)), step))[:110]
            if rng.random() < 0.3:
                stream = warm.stream(prompt, max_tokens=30, seed=step)
                for _ in range(int(rng.integers(0, 6))):
                    next(stream, None)
                stream.close()
            how = {
                "tokens": 1 if rng.random() < 1 / 3 else int(rng.integers(1, device.pick(40, 12))),
                "seed": step,
                "repetition_penalty": float(rng.choice([1, 1.3])),
            }
            if rng.random() < 0.3:
                how["stop_token_ids"] = [int(t) for t in rng.integers(0, TEXT_IDS, 20)]
            reply = check(warm, cold, prompt, **how)
            reused += reply.cached_tokens
            known.append(prompt + reply.token_ids)
    assert reused > device.pick(200, 10)


# ---- growth and the end of the context ------------------------------------------------------------------------------


def test_growth_of_the_cache_in_the_middle_of_a_reply(device):
    """With growth steps of 8 tokens a reply of 100 passes a dozen of them, two steps in flight."""
    prompt, tokens = random_tokens(13), device.pick(100, 20)
    penalties = {"repetition_penalty": 1.2, "repetition_window": 50, "frequency_penalty": 0.3}
    with small_steps(kv_step=1024), open_engine(tiny_model(), max_context=2048) as roomy, small_steps():
        want = ask(roomy, prompt, tokens, **penalties)
        with open_engine(tiny_model(), max_context=2048) as engine:
            got = ask(engine, prompt, tokens, **penalties)
            assert sequence_of(engine).kv_tokens == -(-(12 + tokens) // 8) * 8  # the last token has no row
            assert outcome(engine, got) == outcome(roomy, want)
            assert current_state(engine) == current_state(roomy)
            check(engine, roomy, prompt + got.token_ids, cached=tokens)


def test_a_cache_that_is_larger_than_needed_changes_no_bit(device, monkeypatch):
    """Attention is split by how far a sequence has come, not by the room that an earlier one needed.

    A split shows in few results only, since they are rounded afterwards; so the plans are compared too.
    """
    prompt, longer, reaches = random_tokens(10), random_tokens(100, 1), []
    with small_steps(), open_engine(tiny_model(), max_context=2048) as engine:
        recorder, sequence = runner_of(engine).recorder, sequence_of(engine)
        plan = recorder._plan
        monkeypatch.setattr(recorder, "_plan", lambda key: reaches.append(key) or plan(key))
        want = ask(engine, prompt, 20)
        cold, kv_tokens = (outcome(engine, want), current_state(engine)), sequence.kv_tokens
        assert [key.kv_tokens for key in reaches if key.kind == "decode"] == [16, 24, 32]
        ask(engine, longer, 2)
        assert sequence.kv_tokens > 2 * kv_tokens
        sequence.reset()
        reaches.clear()
        assert (outcome(engine, ask(engine, prompt, 20)), current_state(engine)) == cold
        assert [key.kv_tokens for key in reaches if key.kind == "decode"] == [16, 24, 32]


def test_the_first_large_chunk_follows_a_small_one_that_counts_for_nothing(device, monkeypatch):
    """From that the device learns how much work macOS lets it do at a time."""
    prompt, rows = random_tokens(30), []
    with small_steps(), open_engine(tiny_model(), max_context=2048) as plain:
        want = ask(plain, prompt, 3)
        state = current_state(plain)
        with small_steps(calibration_rows=8), open_engine(tiny_model(), max_context=2048) as engine:
            write = sequence_of(engine).write_chunk
            monkeypatch.setattr(
                sequence_of(engine), "write_chunk", lambda chunk: rows.append(len(chunk)) or write(chunk)
            )
            got = ask(engine, prompt, 3)
            assert outcome(engine, got) == outcome(plain, want)
            assert current_state(engine) == state
            ask(engine, random_tokens(30, 1), 1)
    chunks = [16, *device.pick([13, 1], [14])]
    assert rows == [8, *chunks, *chunks]


@pytest.mark.parametrize(
    ("prompt_tokens", "step"),
    sweep([(n, step) for n in (1, 15, 16, 17, 39) for step in (8, 1024)], (17, 8)),
)
def test_context_exactly_full(device, prompt_tokens, step):
    prompt = random_tokens(prompt_tokens)
    with small_steps(kv_step=1024), open_engine(tiny_model(), max_context=2048) as cold:
        want = ask(cold, prompt, 40 - prompt_tokens)
        with small_steps(kv_step=step), open_engine(tiny_model(), max_context=40) as engine:
            for _ in range(2):
                got = ask(engine, prompt, 1000)
                assert got.completion_tokens == 40 - prompt_tokens
                assert got.finish_reason == "length"
                assert outcome(engine, got) == outcome(cold, want)
            cached = 38 - 1 if prompt_tokens < 39 else 0
            check(engine, cold, (prompt + got.token_ids)[:39], cached=cached, tokens=1)


def test_two_steps_in_flight_give_what_one_gives(cold_engine, stepper, device):
    prompt, tokens = random_tokens(20), device.pick(60, 12)
    sequence_of(cold_engine).reset()
    want = ask(cold_engine, prompt, tokens)
    sequence_of(stepper).reset()
    assert outcome(stepper, ask(stepper, prompt, tokens)) == outcome(cold_engine, want)
    assert current_state(stepper) == current_state(cold_engine)


def test_greedy_reply_follows_the_largest_logit_of_every_step(stepper, cold_engine, device):
    prompt = random_tokens(20)
    reply = ask(cold_engine, prompt, device.pick(30, 10), temperature=0).token_ids
    logits = forced_logits(stepper, prompt + reply, len(prompt))[:-1, : cold_engine.tokenizer.num_tokens]
    assert reply == logits.argmax(1).tolist()
    assert GREEDY.greedy


@pytest.mark.parametrize("canonical", [False, True], ids=["own-rule", "metals-rule"])
@pytest.mark.parametrize("cuts", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_a_prompt_cut_anywhere_goes_on_as_a_cold_one(device: Target, canonical: bool, cuts: int) -> None:
    """Beginnings of earlier prompts with other ends, edits, branches and returns, under the rule of either device."""
    if device.name != "cpu":
        canonical, cuts = True, 6 if cuts == 40 else 60
    rng = np.random.default_rng(cuts)
    with small_steps(canonical=canonical):
        warm, cold = (open_engine(tiny_model(), max_context=120, sequences=3) for _ in range(2))
    start = warm.tokenizer.id_of("<|im_start|>")
    known, reused = [random_tokens(60, 1)], 0
    with warm, cold:
        for step in range(cuts):
            base = known[rng.integers(max(0, len(known) - 6), len(known))]
            cut = int(rng.integers(0, len(base) + 1))
            prompt = (base[:cut] + [start] * int(rng.integers(0, 2)) + random_tokens(int(rng.integers(1, 20)), step))[
                :100
            ]
            reply = check(warm, cold, prompt, tokens=int(rng.integers(1, 6)), seed=step)
            reused += reply.cached_tokens
            known.append(prompt + reply.token_ids)
    assert reused > cuts  # it is about what is reused
