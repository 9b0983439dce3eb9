# SPDX-License-Identifier: Apache-2.0
"""Chunks that go in parts: others run between them, and no bit of anybody's result changes.

Expected values: the same chunks in one piece. Not handled: who runs between two parts (test_scheduler.py); parts as
plans (tests/plan/test_plan_parts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
from engine_device import Target
from engine_harness import open_engine, policy, runner_of
from models import tiny_model

from lily.device.device import CommandList
from lily.engine import Engine
from lily.errors import DeviceError
from lily.run.reply import Reply
from lily.run.requests import Request
from lily.run.residents import Resident
from lily.run.runner import ATTEMPTS, WITHIN, Runner, whole
from lily.run.sequence import Sequence
from lily.sampling import SamplingParams

ROWS, SHORT, TOKENS = 32, 8, 4
SMALL: dict[str, Any] = {"chunks": ((0, ROWS),), "buckets": (8, 16, ROWS), "kv_step": 16}
HOW = SamplingParams(temperature=0.7, seed=6, logprobs=2)
LONG = [int(t) for t in np.random.default_rng(1).integers(0, 900, 2 * ROWS)]
OTHER = [int(t) for t in np.random.default_rng(2).integers(0, 900, SHORT)]


@pytest.fixture(scope="module")
def engine(device: Target) -> Iterator[Engine]:
    with policy(**SMALL, part_rows=SHORT), open_engine(tiny_model(), max_context=128) as engine:
        yield engine


@pytest.fixture
def sequences(engine: Engine) -> Iterator[list[Sequence]]:
    runner = runner_of(engine)
    made = [runner.sequence(max_context=128) for _ in range(2)]
    yield made
    for sequence in made:
        runner.release(sequence)


def parts_of(engine: Engine) -> int:
    return min(ROWS // SHORT, engine.config.num_layers)


def state(sequence: Sequence) -> bytes:
    used = len(sequence.tokens) * sequence.kv_row_bytes
    rows = [buffer.read(0, used) for buffer in sequence.kv.values()]
    return b"".join(part.tobytes() for part in [sequence._state.read(), *rows])


def read(reply: Reply, count: int = TOKENS) -> list[Any]:
    tokens = [reply.next() for _ in range(count)]
    if count == TOKENS:
        reply.stop()
    return tokens


def run(runner: Runner, sequence: Sequence, tokens: list[int]) -> tuple[list[Any], bytes]:
    """A prompt and its reply with nothing in between."""
    for start in range(0, len(tokens) - ROWS, ROWS):
        whole(runner.prefill(sequence, tokens[start : start + ROWS]))
    last = tokens[(len(tokens) - 1) // ROWS * ROWS :]
    return read(whole(runner.start(sequence, last, HOW, (), TOKENS))), state(sequence)


@contextmanager
def submissions(engine: Engine) -> Iterator[list[int]]:
    """Of what is submitted meanwhile, but for steps of replies: how many lists each time."""
    submitted: list[int] = []
    submit = engine._device.submit

    def counting(items: list[CommandList]) -> int:
        if items:  # nothing is submitted by who only waits
            submitted.append(len(items))
        return submit(items)

    with mock.patch.object(engine._device, "submit", counting):
        yield submitted


@pytest.fixture(scope="module")
def in_one_piece(device: Target) -> Iterator[Any]:
    """(of the long prompt, of the other one: tokens and state, both together scored) where nothing goes in parts."""
    with policy(**SMALL, part_rows=ROWS), open_engine(tiny_model(), max_context=128) as own:
        runner = runner_of(own)
        long, other, *scored = (runner.sequence(max_context=128) for _ in range(4))
        results = [run(runner, long, LONG), run(runner, other, OTHER)]
        texts = zip(scored, (LONG[: ROWS + 1], OTHER), strict=True)
        scores = [whole(runner.score(sequence, tokens[:-1], tokens[1:], 3)) for sequence, tokens in texts]
        yield *results, [[array.tobytes() for array in score] for score in scores]


def test_a_chunk_in_parts_gives_the_bits_of_one_in_one_piece(engine, sequences, in_one_piece):
    with submissions(engine) as submitted:
        assert run(runner_of(engine), sequences[0], LONG) == in_one_piece[0]
    chunk = [1] * parts_of(engine)
    assert submitted == [*chunk, *chunk[:-1], 2]  # the last part of the last chunk comes with its sampling


def test_others_run_between_parts(engine, sequences, in_one_piece):
    """A short prompt, steps of a reply, and scratch memory that grows, for which every recorded list goes."""
    runner, (long, other) = runner_of(engine), sequences
    whole(runner.prefill(long, LONG[:ROWS]))
    parts = runner.start(long, LONG[ROWS:], HOW, (), TOKENS)
    reply, tokens = None, []
    while True:
        try:
            assert next(parts) == WITHIN
        except StopIteration as end:
            mine = read(end.value)
            break
        if reply is None:
            reply = whole(runner.start(other, OTHER, HOW, (), TOKENS))
            tokens += read(reply, 1)
            runner.recorder.reserve("scratch", runner.recorder.buffers["scratch"].nbytes + 1)
    assert (mine, state(long)) == in_one_piece[0]
    tokens += read(reply, TOKENS - 1)
    reply.stop()
    assert (tokens, state(other)) == in_one_piece[1]


def test_scores_between_parts_of_a_score_are_their_own(engine, sequences, in_one_piece):
    runner = runner_of(engine)
    long = runner.score(sequences[0], LONG[:ROWS], LONG[1 : ROWS + 1], 3)
    assert next(long) == WITHIN
    other = whole(runner.score(sequences[1], OTHER[:-1], OTHER[1:], 3))
    assert [array.tobytes() for array in other] == in_one_piece[2][1]
    assert [array.tobytes() for array in whole(long)] == in_one_piece[2][0]


def test_a_chunk_that_nobody_wants_any_more_is_taken_back(engine, sequences, in_one_piece):
    runner, sequence = runner_of(engine), sequences[0]
    whole(runner.prefill(sequence, LONG[:ROWS]))
    before = state(sequence)
    parts = runner.prefill(sequence, LONG[ROWS:])
    next(parts)
    parts.close()
    assert sequence.tokens == LONG[:ROWS]
    assert state(sequence) == before
    reply = whole(runner.start(sequence, LONG[ROWS:], HOW, (), TOKENS))
    assert (read(reply), state(sequence)) == in_one_piece[0]


def test_a_prompt_that_is_cancelled_within_a_chunk_keeps_what_was_read(engine, sequences):
    """Where rows are not invariant this is the last chunk."""
    sequence = sequences[0]
    work = engine._reply(Request(), LONG, HOW, (), TOKENS, None, None, Resident(sequence))
    while next(work) != WITHIN or len(sequence.tokens) <= ROWS:
        pass
    work.close()
    assert sequence.tokens == LONG[:ROWS]
    assert ROWS in sequence.points


def stopping(at: set[int], *, again: bool) -> Any:
    """Parts whose number is in ``at``, counted from 0, end with an error after they have run."""
    run_part, parts = Runner._run_part, count()

    def failing(runner: Runner, *what: Any) -> int:
        ticket = run_part(runner, *what)
        if next(parts) in at:
            raise DeviceError("injected", again=again)
        return ticket

    return mock.patch.object(Runner, "_run_part", failing)


def test_after_a_part_that_was_stopped_the_chunk_runs_again_from_its_beginning(engine, sequences, in_one_piece):
    """What a layer adds to the residual stream must not be added twice."""
    parts = parts_of(engine)
    with submissions(engine) as submitted, stopping({parts - 1}, again=True):
        assert run(runner_of(engine), sequences[0], LONG) == in_one_piece[0]
    assert len(submitted) == 3 * parts  # the first chunk twice


@pytest.mark.parametrize("again", [True, False])
def test_a_chunk_whose_parts_fail_for_good_leaves_the_sequence_as_it_was(engine, sequences, in_one_piece, again):
    runner, sequence = runner_of(engine), sequences[0]
    whole(runner.prefill(sequence, LONG[:ROWS]))
    before = state(sequence)
    every_second = stopping(set(range(1, 100, 2)), again=again)
    with submissions(engine) as submitted, every_second, pytest.raises(DeviceError, match="injected"):
        whole(runner.prefill(sequence, LONG[ROWS:]))
    assert len(submitted) == 2 * (ATTEMPTS if again else 1)
    assert (sequence.tokens, state(sequence)) == (LONG[:ROWS], before)
    reply = whole(runner.start(sequence, LONG[ROWS:], HOW, (), TOKENS))
    assert (read(reply), state(sequence)) == in_one_piece[0]
