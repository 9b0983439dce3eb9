# SPDX-License-Identifier: Apache-2.0
"""Several sequences on the same weights: each gives the bits that it gives alone, whoever runs in between.

Expected values: an engine that knows nothing else. Not handled: reuse within one sequence (test_engine_exact.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_device import Target
from engine_harness import open_engine, policy, runner_of, sequence_of
from models import tiny_model

from lily.engine import Engine
from lily.run.reply import Reply
from lily.run.runner import Runner, whole
from lily.run.sequence import Sequence
from lily.sampling import SamplingParams

# Two chunks of a prompt, a cache that grows in steps of 16 tokens.
SMALL = {"chunks": ((0, 16),), "buckets": (8, 16), "kv_step": 16}
LENGTHS = 21, 17, 30
TOKENS = 6


@pytest.fixture(scope="module")
def engine(device: Target) -> Iterator[Engine]:
    with policy(**SMALL), open_engine(tiny_model(), max_context=128) as engine:
        yield engine


def prompt(number: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(number).integers(0, 900, length)]


def params(number: int) -> SamplingParams:
    """Of three sequences one is greedy, one samples with a seed and penalties, one reports log-probabilities."""
    return (
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.7, seed=6, logprobs=2),
    )[number]


def begin(runner: Runner, sequence: Sequence, number: int) -> Reply:
    """Runs a prompt in two chunks; the last one samples."""
    tokens = prompt(number, LENGTHS[number])
    whole(runner.prefill(sequence, tokens[:16]))
    return whole(runner.start(sequence, tokens[16:], params(number), (), TOKENS))


def state(sequence: Sequence) -> bytes:
    used = len(sequence.tokens) * sequence.kv_row_bytes
    rows = [buffer.read(0, used) for buffer in sequence.kv.values()]
    return b"".join(part.tobytes() for part in [sequence._state.read(), *rows])


def read(reply: Reply) -> list[Any]:
    tokens = []
    while (token := reply.next()) is not None:
        tokens.append(token)
    reply.stop()
    return tokens


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[list[Any], bytes]]:
    """What each gives in an engine of its own."""
    results = []
    for number in range(len(LENGTHS)):
        with policy(**SMALL), open_engine(tiny_model(), max_context=128) as own:
            sequence = sequence_of(own)
            results.append((read(begin(runner_of(own), sequence, number)), state(sequence)))
    return results


@pytest.fixture
def sequences(engine: Engine) -> Iterator[list[Sequence]]:
    runner = runner_of(engine)
    made = [runner.sequence(max_context=128) for _ in LENGTHS]
    yield made
    for sequence in made:
        runner.release(sequence)


def test_replies_one_after_the_other(engine, sequences, alone):
    for number, sequence in enumerate(sequences):
        assert (read(begin(runner_of(engine), sequence, number)), state(sequence)) == alone[number]
    for number, sequence in enumerate(sequences):  # nobody has touched it since
        assert state(sequence) == alone[number][1]


def test_chunks_in_turn(engine, sequences, alone):
    runner = runner_of(engine)
    prompts = [prompt(number, length) for number, length in enumerate(LENGTHS)]
    for sequence, tokens in zip(sequences, prompts, strict=True):
        whole(runner.prefill(sequence, tokens[:16]))
    for number, (sequence, tokens) in enumerate(zip(sequences, prompts, strict=True)):
        reply = whole(runner.start(sequence, tokens[16:], params(number), (), TOKENS))
        assert (read(reply), state(sequence)) == alone[number]


def test_a_prompt_between_the_tokens_of_a_reply(engine, sequences, alone):
    """The reply is stopped, others run, and it goes on from where it was."""
    runner, first = runner_of(engine), sequences[0]
    reply = begin(runner, first, 0)
    tokens = [reply.next() for _ in range(3)]
    reply.stop()
    kept = first.tokens[:]
    assert read(begin(runner, sequences[1], 1)) == alone[1][0]
    assert first.tokens == kept
    known = [*prompt(0, LENGTHS[0]), *(token.id for token in tokens)]
    if engine._policy.rows_invariant:
        at = first.resume(known)
        rest = whole(runner.start(first, known[at:], params(0), (), TOKENS - 3))
        got = [token.id for token in [*tokens, *read(rest)]]
        assert got == [token.id for token in alone[0][0]]


def poison(runner: Runner, sequence: Sequence) -> None:
    """NaN for all that the next chunk must write first: scratch memory, unused rows, the slot that is not current."""
    used = len(sequence.tokens) * sequence.kv_row_bytes
    runner.recorder.buffers["scratch"].fill(0xFF)
    sequence.buffers[f"state.{'BA'[sequence.slot]}"].fill(0xFF)
    for buffer in sequence.kv.values():
        buffer.write(np.full(buffer.nbytes - used, 0xFF, np.uint8), used)


def test_what_nobody_has_written_decides_nothing(engine, sequences, alone):
    runner = runner_of(engine)
    for number, sequence in enumerate(sequences):
        read(begin(runner, sequence, number))  # memory has its size now
        sequence.reset()
        tokens = prompt(number, LENGTHS[number])
        poison(runner, sequence)
        whole(runner.prefill(sequence, tokens[:16]))
        poison(runner, sequence)
        reply = whole(runner.start(sequence, tokens[16:], params(number), (), TOKENS))
        assert (read(reply), state(sequence)) == alone[number]


def test_released_memory_comes_back(engine):
    runner = runner_of(engine)
    before = runner.nbytes
    sequence = runner.sequence(max_context=128)
    read(begin(runner, sequence, 1))
    assert runner.nbytes > before
    shared = runner.recorder.nbytes
    runner.release(sequence)
    assert runner.nbytes - runner.recorder.nbytes <= before
    assert runner.recorder.nbytes == shared
    assert not sequence.buffers


def test_a_sequence_that_grows_keeps_its_rows_and_the_lists_of_others(engine, sequences, alone):
    runner, (first, second, _) = runner_of(engine), sequences
    read(begin(runner, first, 0))
    lists = {key: pair for key, pair in runner.recorder._recorded.items() if key[0] is first}
    assert lists
    runner.reserve(second, 100)
    assert {key: pair for key, pair in runner.recorder._recorded.items() if key[0] is first} == lists
    assert read(begin(runner, second, 1)) == alone[1][0]
    assert state(first) == alone[0][1]
