# SPDX-License-Identifier: Apache-2.0
"""Which sequence a request gets, without a device: what is shared, what is copied, what gives way, what has to wait."""

from __future__ import annotations

from collections import abc
from types import SimpleNamespace
from typing import Any

from lily.errors import DeviceError
from lily.run.residents import Resident, Residents
from lily.run.sequence import common_prefix

FIXED = 100  # bytes of a sequence without tokens


class Fake:
    """A sequence that can be resumed anywhere."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.copied: list[tuple[Fake, int, bool]] = []

    @property
    def nbytes(self) -> int:
        return FIXED + len(self.tokens)

    def match(self, prompt: abc.Sequence[int], *, in_use: bool = False) -> int:
        return min(common_prefix(self.tokens, prompt), max(len(prompt) - 1, 0))

    def reset(self) -> None:
        self.tokens = []

    def copy_prefix(self, other: Fake, prompt: abc.Sequence[int], *, in_use: bool) -> int:
        position = other.match(prompt)
        self.copied.append((other, position, in_use))
        self.tokens = list(prompt[:position])
        return position


class Runner:
    policy = SimpleNamespace(kv_tokens=lambda tokens: tokens)

    def __init__(self) -> None:
        self.released: list[Fake] = []
        self.most = 100

    def sequence(self, **_: Any) -> Fake:
        self.most -= 1
        if self.most < 0:
            raise DeviceError("no memory")
        return Fake()

    def release(self, sequence: Fake) -> None:
        sequence.tokens = [-1]  # as nothing may use it any more
        self.released.append(sequence)

    def reserve(self, sequence: Fake, tokens: int) -> None:
        pass


def residents(runner: Runner, count: int = 3, budget: int = 1 << 40) -> Residents:
    return Residents(
        runner, count=count, budget=budget, max_context=1000, snapshots=4,  # type: ignore[arg-type]
        sequence_bytes=lambda tokens: FIXED + tokens,
    )  # fmt: skip


def serve(pool: Residents, tokens: list[int], reserve: int = 0) -> Fake:
    """A request from its beginning to its end."""
    taken = take(pool, tokens, reserve)
    assert taken is not None
    pool.give_back(taken)
    return taken.sequence  # type: ignore[return-value]


def take(pool: Residents, tokens: list[int], reserve: int = 0) -> Resident | None:
    taken = pool.take(tokens, reserve or len(tokens))
    if taken is not None:
        taken.sequence.tokens = tokens[:]
    return taken


A, B, C, D = ([n] * 50 for n in (1, 2, 3, 4))


def test_a_conversation_goes_on_in_its_sequence() -> None:
    pool = residents(Runner())
    a, b = serve(pool, A), serve(pool, B)
    assert a is not b
    assert serve(pool, [*A, 9]) is a
    assert serve(pool, [*B, 9]) is b
    assert serve(pool, [*A, 9, 8]) is a


def test_the_one_that_was_used_longest_ago_gives_way() -> None:
    pool = residents(Runner(), count=2)
    a, b = serve(pool, A), serve(pool, B)
    assert serve(pool, [*A, 9]) is a
    assert serve(pool, C) is b
    assert serve(pool, [*A, 9, 9]) is a


def test_what_two_conversations_share_is_copied_and_neither_loses_its_own() -> None:
    pool = residents(Runner())
    system = [7] * 20
    a = serve(pool, [*system, *A])
    b = serve(pool, [*system, *B])
    assert b is not a
    assert b.copied == [(a, 20, False)]
    assert a.tokens == [*system, *A]
    assert serve(pool, [*system, *A, 9]) is a


def test_what_is_mostly_shared_goes_on_in_place() -> None:
    """The next turn of a conversation of which the template drops the end."""
    pool = residents(Runner())
    a = serve(pool, [*A, *[5] * 40])
    assert serve(pool, [*A, 6]) is a


def test_a_sequence_in_use_is_copied_from_and_never_given_away() -> None:
    pool = residents(Runner(), count=2)
    first = take(pool, A)
    second = take(pool, [*A, 9])
    assert first is not None
    assert second is not None
    assert second.sequence is not first.sequence
    assert second.sequence.copied == [(first.sequence, 50, True)]  # type: ignore[attr-defined]
    assert take(pool, C) is None
    pool.give_back(first)
    third = take(pool, C)
    assert third is not None
    assert third.sequence is first.sequence


def test_idle_sequences_are_released_for_one_that_needs_their_memory() -> None:
    runner = Runner()
    pool = residents(runner, budget=3 * FIXED + 160)
    a, b, c = (serve(pool, tokens) for tokens in (A, B, C))
    assert runner.released == []
    assert serve(pool, [*C, 9], reserve=120) is c
    assert runner.released == [a]
    assert pool.sequences == [b, c]


def test_a_request_waits_for_the_memory_of_those_that_run() -> None:
    pool = residents(Runner(), budget=2 * FIXED + 160)
    first = take(pool, A, reserve=100)
    assert first is not None
    assert take(pool, B, reserve=100) is None
    small = take(pool, C, reserve=50)
    assert small is not None
    pool.give_back(first)
    pool.give_back(small)
    assert take(pool, B, reserve=100) is not None


def test_where_two_do_not_fit_what_they_share_goes_on_in_place() -> None:
    """The one to copy from must not be released for the copy."""
    runner = Runner()
    pool = residents(runner, budget=2 * FIXED)
    system = [7] * 20
    a = serve(pool, [*system, *A])
    taken = pool.take([*system, *B], 70)
    assert taken is not None
    assert taken.sequence is a
    assert common_prefix(taken.sequence.tokens, [*system, *B]) == 20
    assert a not in runner.released
    assert pool.sequences == [a]


def test_one_alone_is_always_served() -> None:
    """That it fits was settled when the engine opened."""
    assert take(residents(Runner(), budget=10), A, reserve=1000) is not None


def test_where_there_is_no_memory_for_one_more_those_that_are_there_do() -> None:
    runner = Runner()
    runner.most = 1
    pool = residents(runner)
    assert serve(pool, A) is serve(pool, B)
    assert len(pool.sequences) == 1
