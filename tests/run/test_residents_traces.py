# SPDX-License-Identifier: Apache-2.0
"""How much of agents' prompts is read again: 84 requests of two sessions, replayed against the residents alone.

``data/traces.npz`` has prompts of up to 52K tokens of the real tokenizer, their texts and lengths made up: loops of
tool calls, new turns, requests for a title and subagents. Each is a beginning of an earlier one and a tail of its own.
The least that can be read again, with any point kept for ever, is 7.1 % of ``plain`` and 4.4 % where earlier reasoning
is preserved.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_sequences import FakeRunner
from paths import DATA
from real_model import WHOLE

from lily.plan.memory import StateLayout
from lily.policy import POLICIES
from lily.run.budget import sequence_bytes
from lily.run.chunks import cut, kept_points
from lily.run.history import common_prefix
from lily.run.points import Marks
from lily.run.residents import Residents

MARKS = Marks(248045, (248045, 846), (248045, 74455), (248045, 846, 198, 248066))
GB = 10**9


def prompts(name: str) -> Iterator[tuple[str, list[int]]]:
    """Of each request its kind, and its prompt."""
    with np.load(DATA / "traces.npz") as data:
        kinds, bases, keeps, lengths, tails = (
            data[f"{name}_{key}"] for key in ("kind", "base", "keep", "tail_len", "tail")
        )
    ends = np.cumsum(lengths)
    made: list[list[int]] = []
    for kind, base, keep, end, length in zip(kinds, bases, keeps, ends, lengths, strict=True):
        beginning = made[base][:keep] if keep else []
        made.append([*beginning, *tails[end - length : end].tolist()])
        yield str(kind), made[-1]


def replayed(name: str, *, device: str = "metal", sequences: int = 4, budget: float = 16 * GB) -> float:
    """The share of all prompts' tokens that is read again."""
    policy = POLICIES[device]
    runner = FakeRunner(policy, state=StateLayout.of(WHOLE, policy).nbytes, token=20480)
    pool = Residents(
        runner, count=sequences, budget=int(budget), max_context=65536, marks=MARKS,  # type: ignore[arg-type]
        sequence_bytes=lambda tokens, points: sequence_bytes(WHOLE, policy, tokens, points),
    )  # fmt: skip
    total = again = 0
    for _, tokens in prompts(name):
        resident = pool.take(tokens, len(tokens) + 2000)
        assert resident is not None
        sequence = resident.sequence
        start = sequence.resume(tokens)
        assert common_prefix(sequence.tokens, tokens) == start
        for chunk in cut(tokens, start, policy, MARKS, resident.shared):
            sequence.append(tokens[chunk.start : chunk.end])
            if chunk.keep:
                sequence.snapshot()
        sequence.keep_only(kept_points(tokens, start, policy, MARKS, resident.shared))
        sequence.append([1] * 300)  # the reply
        pool.give_back(resident)
        total, again = total + len(tokens), again + len(tokens) - start
    return again / total


def test_the_marks_are_the_tokenizers() -> None:
    """The traces begin messages with these, and have all kinds of them."""
    tokens = next(tokens for kind, tokens in prompts("plain") if kind == "loop")
    starts = MARKS.starts(tokens)
    assert len(starts) > 2
    assert MARKS.turn(tokens) in starts
    assert tuple(tokens[starts[-2] : starts[-2] + 4]) == MARKS.tool_result


@pytest.mark.parametrize(("name", "most"), [("plain", 0.087), ("preserve_thinking", 0.062), ("echo", 0.087)])
def test_agents_prompts_are_hardly_read_again(name: str, most: float) -> None:
    assert replayed(name) <= most
    assert replayed(name, device="cpu") <= most


def test_a_small_machine_keeps_most_of_it() -> None:
    """What a Mac of 32 GB has for two sequences."""
    assert replayed("plain", sequences=2, budget=2.55 * GB) <= 0.087
    assert replayed("preserve_thinking", sequences=2, budget=2.55 * GB) <= 0.062
