# SPDX-License-Identifier: Apache-2.0
"""Which sequence a request gets, without a device: what is shared, what is copied, what gives way, what has to wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fake_sequences import FakeRunner, FakeSequence

from lily.policy import POLICIES, Policy
from lily.run.chunks import cut, kept_points
from lily.run.history import common_prefix
from lily.run.points import Marks
from lily.run.residents import CHEAP, Resident, Residents

FIXED = 100  # bytes of a sequence without tokens
POLICY = replace(POLICIES["cpu"], kv_step=1)


def runner_of() -> FakeRunner:
    return FakeRunner(POLICY, fixed=FIXED)


def residents(runner: FakeRunner, count: int = 3, budget: int = 1 << 40) -> Residents:
    return Residents(
        runner, count=count, budget=budget, max_context=1000, marks=Marks(),  # type: ignore[arg-type]
        sequence_bytes=lambda tokens, points: FIXED + tokens,
    )  # fmt: skip


def serve(pool: Residents, tokens: list[int], reserve: int = 0) -> FakeSequence:
    """A request from its beginning to its end."""
    taken = take(pool, tokens, reserve)
    assert taken is not None
    pool.give_back(taken)
    return taken.sequence  # type: ignore[return-value]


def take(pool: Residents, tokens: list[int], reserve: int = 0) -> Resident | None:
    taken = pool.take(tokens, reserve or len(tokens))
    if taken is not None:  # all of the prompt is read, and any place of it can be resumed
        taken.sequence.tokens, taken.sequence.points = tokens[:], dict.fromkeys(range(1, len(tokens) + 1))
    return taken


A, B, C, D = ([n] * 50 for n in (1, 2, 3, 4))


def test_a_conversation_goes_on_in_its_sequence() -> None:
    pool = residents(runner_of())
    a, b = serve(pool, A), serve(pool, B)
    assert a is not b
    assert serve(pool, [*A, 9]) is a
    assert serve(pool, [*B, 9]) is b
    assert serve(pool, [*A, 9, 8]) is a


def test_the_one_that_was_used_longest_ago_gives_way() -> None:
    pool = residents(runner_of(), count=2)
    a, b = serve(pool, A), serve(pool, B)
    assert serve(pool, [*A, 9]) is a
    assert serve(pool, C) is b
    assert serve(pool, [*A, 9, 9]) is a


def test_what_two_conversations_share_is_copied_and_neither_loses_its_own() -> None:
    pool = residents(runner_of())
    system = [7] * 20
    a = serve(pool, [*system, *A])
    b = serve(pool, [*system, *B])
    assert b is not a
    assert b.copied == [(a, 20, False)]
    assert a.tokens == [*system, *A]
    assert serve(pool, [*system, *A, 9]) is a


def test_what_is_mostly_shared_goes_on_in_place() -> None:
    """The next turn of a conversation of which the template drops the end."""
    pool = residents(runner_of())
    a = serve(pool, [*A, *[5] * 40])
    assert serve(pool, [*A, 6]) is a


def test_a_sequence_in_use_is_copied_from_and_never_given_away() -> None:
    pool = residents(runner_of(), count=2)
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


def test_idle_sequences_give_way_when_one_grows_and_not_before() -> None:
    runner = runner_of()
    pool = residents(runner, budget=3 * FIXED + 160)
    a, b, c = (serve(pool, tokens) for tokens in (A, B, C))
    assert runner.released == []
    growing = take(pool, [*C, 9], reserve=120)
    assert growing is not None
    assert growing.sequence is c
    assert runner.released == []
    runner.recorder.before_growth(c, 120)
    assert runner.released == [a]
    assert pool.sequences == [b, c]


def test_a_request_waits_for_the_memory_of_those_that_run() -> None:
    pool = residents(runner_of(), budget=2 * FIXED + 170)
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
    runner = runner_of()
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
    assert take(residents(runner_of(), budget=10), A, reserve=1000) is not None


def test_where_there_is_no_memory_for_one_more_those_that_are_there_do() -> None:
    runner = runner_of()
    runner.most = 1
    pool = residents(runner)
    assert serve(pool, A) is serve(pool, B)
    assert len(pool.sequences) == 1


# ---- conversations: 1 opens a message, 2 is the user, 3 the assistant, 4 the result of a tool
MARKS = Marks(1, (1, 2), (1, 3), (1, 2, 4))
CANONICAL = replace(POLICIES["metal"], kv_step=1, chunks=((0, 64),), message_gap=8)


def conversation(*messages: tuple[int, int]) -> list[int]:
    """Messages of a kind and a number of tokens, and the beginning of a reply."""
    texts = [[1, kind, *range(100 + 1000 * kind + n, 100 + 1000 * kind + n + 40)] for kind, n in messages]
    return [*(token for text in texts for token in text), 1, 3]


SYSTEM = (5, 0)


def chats(runner: FakeRunner, budget: int = 1 << 40) -> Residents:
    return Residents(
        runner, count=4, budget=budget, max_context=100_000, marks=MARKS,  # type: ignore[arg-type]
        sequence_bytes=lambda tokens, points: FIXED + tokens,
    )  # fmt: skip


def chat(pool: Residents, tokens: list[int], policy: Policy = CANONICAL) -> tuple[FakeSequence, int, str]:
    """A request and its reply of 300 tokens: the sequence, how much of the prompt was there, and why."""
    taken = pool.take(tokens, len(tokens) + 300)
    assert taken is not None
    sequence: FakeSequence = taken.sequence  # type: ignore[assignment]
    start = sequence.resume(tokens)
    for chunk in cut(tokens, start, policy, MARKS, taken.shared):
        sequence.append(tokens[chunk.start : chunk.end])
        if chunk.keep:
            sequence.snapshot()
    sequence.keep_only(kept_points(tokens, start, policy, MARKS, taken.shared))
    sequence.append([9] * 300)
    pool.give_back(taken)
    return sequence, start, taken.reason


def test_a_conversation_comes_back_as_it_was_after_another_one() -> None:
    pool = chats(FakeRunner(CANONICAL))
    first = [SYSTEM, (2, 1), (3, 1), (2, 2)]
    a, start, reason = chat(pool, conversation(*first))
    assert (start, reason) == (0, "cold")
    b, start, reason = chat(pool, conversation(SYSTEM, (2, 7)))  # departs at the end of the system message
    assert b is not a
    assert (start, reason) == (42, "diverged at token 44")
    again, start, reason = chat(pool, conversation(*first, (3, 2), (2, 3)))
    assert again is a
    assert (start, reason) == (42 * 4, "hit")


def test_an_edited_message_is_another_conversation() -> None:
    pool = chats(FakeRunner(CANONICAL))
    long = [(2 + n % 2, n) for n in range(20)]
    a, _, _ = chat(pool, conversation(SYSTEM, *long, (2, 90)))
    edited, start, _ = chat(pool, conversation(SYSTEM, *long, (2, 91)))
    assert edited is not a
    assert start > 0
    assert chat(pool, conversation(SYSTEM, *long, (2, 90), (3, 90), (2, 92)))[0] is a


def test_a_new_turn_goes_on_although_the_thoughts_of_the_last_one_are_dropped() -> None:
    pool = chats(FakeRunner(CANONICAL))
    loop = [(3, 1), (2, 2), *[(3, n) for n in range(10, 40)]]
    a, _, _ = chat(pool, conversation(SYSTEM, (2, 1), *loop))
    again, start, reason = chat(pool, conversation(SYSTEM, (2, 1), (3, 1), (2, 2), (3, 500), (2, 3)))
    assert again is a
    assert (start, reason) == (42 * 4, "hit")


def test_title_tags_and_questions_beside_a_chat_do_not_take_its_place() -> None:
    """As Open WebUI asks for them after each reply, in parallel and with other texts first."""
    pool = chats(FakeRunner(CANONICAL))
    talk = [(2, 1)]
    a, _, _ = chat(pool, conversation(*talk))
    for turn in range(2, 8):
        for kind in (20, 40, 60):  # other first messages, with the chat inside
            assert chat(pool, conversation((2, kind * 100), (2, turn)))[0] is not a
        talk += [(3, turn), (2, turn)]
        same, start, reason = chat(pool, conversation(*talk))
        assert (same, reason) == (a, "hit")
        assert start >= 42 * (len(talk) - 2)


def test_what_costs_least_to_read_again_gives_way() -> None:
    runner = FakeRunner(CANONICAL, fixed=FIXED, state=50)
    pool = chats(runner, budget=5000)
    long, short = conversation(*[(2 + n % 2, n) for n in range(60)]), conversation((2, 700))
    a, _, _ = chat(pool, long)
    b, _, _ = chat(pool, short)
    chat(pool, conversation((2, 800), *[(2 + n % 2, n + 100) for n in range(40)]))
    assert runner.released == [b]
    assert chat(pool, [*long, 7])[0] is a
    assert chat(pool, short)[2] == "cold"  # it was too short to be worth remembering


def test_that_something_was_evicted_is_said() -> None:
    runner = FakeRunner(CANONICAL, fixed=FIXED)
    pool = chats(runner, budget=4000)
    long = conversation(*[(2 + n % 2, n) for n in range(60)])
    chat(pool, long)
    chat(pool, conversation((2, 900), *[(2 + n % 2, n + 100) for n in range(60)]))
    assert chat(pool, [*long, 7])[1:] == (0, "evicted")


def test_where_nothing_else_runs_a_request_with_many_points_is_served() -> None:
    """Beside an idle conversation, with memory for a full context and the usual points: there is none to wait for."""
    runner = FakeRunner(CANONICAL, fixed=FIXED, state=50)
    pool = Residents(
        runner, count=2, budget=FIXED + 1100 + 4 * 50, max_context=1000, marks=MARKS,  # type: ignore[arg-type]
        sequence_bytes=lambda tokens, points: FIXED + tokens + 50 * points,
    )  # fmt: skip
    chat(pool, conversation((2, 1)))
    long = [1, 5, *range(5000, 5800), *conversation((2, 2))]  # a first message with points of its own
    assert pool.take(long, 1000) is not None


# ---- conversations on disk
class Disk:
    """A shelf that holds what it was given, in the host's memory; sequences of it have every point."""

    def __init__(self) -> None:
        self.kept: list[list[int]] = []
        self.damaged = False

    def keep(self, sequence: FakeSequence) -> None:
        if sequence.points:
            self.kept.append(sequence.tokens[:])

    def match(self, tokens: list[int]) -> tuple[Any, int]:
        shared = {common_prefix(kept, tokens[:-1]): kept for kept in self.kept}
        position = max(shared, default=0)
        if not position:
            return None, 0
        return SimpleNamespace(tokens=shared[position], points=(position,), latest=position), position

    def restore(self, saved: Any, sequence: FakeSequence, position: int) -> Iterator[None]:
        sequence.reset()
        yield
        if not self.damaged:
            sequence.tokens, sequence.points = saved.tokens[:position], {position: None}


def with_disk(count: int = 1, budget: int = 1 << 40) -> tuple[Residents, Disk]:
    disk = Disk()
    pool = Residents(
        runner_of(), count=count, budget=budget, max_context=10_000, marks=Marks(),  # type: ignore[arg-type]
        sequence_bytes=lambda tokens, points: FIXED + tokens, shelf=disk,  # type: ignore[arg-type]
    )  # fmt: skip
    return pool, disk


LONG, OTHER = [1] * 2000, [2] * 2000


def test_what_gives_way_is_written_first_and_read_again() -> None:
    pool, disk = with_disk()
    serve(pool, LONG)
    serve(pool, OTHER)
    assert disk.kept == [LONG]
    again = pool.take([*LONG, 9], 2001)
    assert again is not None
    assert disk.kept == [LONG, OTHER]
    assert (again.reason, again.sequence.tokens, again.shared) == ("hit", [], (0, 2000))
    assert len(list(again.fetch())) == 1
    assert again.sequence.tokens == LONG
    pool.give_back(again)
    once_more = pool.take([*LONG, 9], 2001)
    assert once_more is not None
    assert list(once_more.fetch()) == [], "it is on the device"


def test_what_saves_little_is_not_read_from_disk() -> None:
    pool, disk = with_disk()
    disk.kept = [LONG]
    serve(pool, [1] * (2000 - CHEAP))
    taken = pool.take([*LONG, 9], 2001)
    assert taken is not None
    assert list(taken.fetch()) == []
    disk.kept = [[*LONG, 9, 9]]
    pool.give_back(taken)
    taken.sequence.tokens, taken.sequence.points = [1] * 1400, {1400: None}
    taken = pool.take([*LONG, 9, 9, 9], 2003)
    assert taken is not None
    assert len(list(taken.fetch())) == 1


def test_a_long_conversation_is_not_read_from_disk_for_little() -> None:
    """All of it would have to be read."""
    pool, disk = with_disk()
    disk.kept = [[1] * 9600]
    for there, fetched in ((9000, False), (8999, True)):
        (sequence,) = pool.sequences
        sequence.tokens, sequence.points = [1] * there, {there: None}
        taken = pool.take([1] * 9601, 9601)
        assert taken is not None
        assert bool(list(taken.fetch())) is fetched
        pool.give_back(taken)


def test_a_file_that_turns_out_to_be_damaged_is_a_cold_start() -> None:
    pool, disk = with_disk()
    disk.kept, disk.damaged = [LONG], True
    taken = pool.take([*LONG, 9], 2001)
    assert taken is not None
    list(taken.fetch())
    assert (taken.sequence.tokens, taken.reason) == ([], "cold")


def test_a_request_that_does_not_fit_reads_nothing() -> None:
    pool, disk = with_disk(count=2, budget=2 * FIXED + 2100)
    disk.kept = [LONG]
    running = take(pool, B)
    assert running is not None
    assert pool.take([*LONG, 9], 2100) is None
    assert [len(resident.tokens) for resident in pool.sequences] == [50, 0]


def test_a_point_that_gives_way_is_written_first() -> None:
    pool, disk = with_disk(count=2, budget=3000)
    first = serve(pool, LONG)
    first._sizes = (100, 1, 1)  # its points take memory, which is to be had again
    assert take(pool, [2] * 500) is not None
    assert LONG in disk.kept
    assert len(first.points) < 2000


def test_in_the_end_all_that_nobody_uses_is_written() -> None:
    pool, disk = with_disk(count=3)
    serve(pool, LONG)
    serve(pool, OTHER)
    running = take(pool, [3] * 900)
    assert running is not None
    pool.shelve()
    assert disk.kept == [LONG, OTHER]
