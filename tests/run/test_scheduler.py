# SPDX-License-Identifier: Apache-2.0
"""The engine's thread without an engine: who runs when, counted in chunks and steps; cancelling, failing, closing.

Not handled: what requests do (test_engine_parallel.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import PATIENCE, until

from lily.errors import DeviceError, InvalidRequestError, TimeLimitError
from lily.run.requests import AHEAD, Request, Scheduling
from lily.run.runner import WITHIN
from lily.run.scheduler import PASSED, SLICE_TOKENS, Scheduler, Task

SHORT = 512
Log = list[tuple[str, str]]


class Places:
    """In place of the residents: ``count`` requests may run at a time."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.abandoned: list[object] = []

    def take(self, tokens: object, reserve: int) -> Any:
        if not self.free:
            return None
        self.free -= 1
        return SimpleNamespace(sequence=object())

    def give_back(self, resident: object) -> None:
        self.free += 1


class Bench:
    """A scheduler that is held up until ``go``, so that all requests of a test are there when it begins."""

    def __init__(self, places: int = 8) -> None:
        self.log: Log = []
        self.places = Places(places)
        self.released = Event()
        self.now = 0.0  # what the scheduler takes for the time, in seconds
        self._held_up, self._gate = Event(), Event()
        self.scheduler = Scheduler(
            self.places,  # type: ignore[arg-type]
            abandon=self.places.abandoned.append, release=self.released.set, short=SHORT, clock=lambda: self.now,
        )  # fmt: skip
        held = Request()
        self.scheduler.submit(Task(held, (), 0, lambda sequence: self._held()))
        self._held_request = held
        assert self._held_up.wait(PATIENCE)

    def _held(self) -> Generator[int, None, None]:
        self._held_up.set()
        self._gate.wait(PATIENCE)
        return
        yield

    def go(self) -> None:
        self._gate.set()
        assert self._held_request.over.wait(PATIENCE)

    def add(
        self, name: str, chunks: int = 1, rows: int = 8, steps: int = 0, unread: bool = False, **scheduling: Any
    ) -> Request:
        """A request of a prompt in so many chunks and a reply in so many steps, read at once unless ``unread``."""
        request = Request()
        request.hurried = not unread

        def work(sequence: object) -> Generator[int, None, None]:
            for left in range(chunks, 0, -1):
                yield left * rows
                self.log.append((name, "chunk"))
            for step in range(steps):
                self.log.append((name, "step"))
                request.put(step)
                if request.turn_over():
                    yield 0

        self.scheduler.submit(Task(request, (), 0, work, Scheduling(**scheduling)))
        return request

    def rounds(self, count: int = 2) -> None:
        """Lets the scheduler look at everything again."""
        for _ in range(count):
            finished(self.add("round", chunks=0))

    def names(self, kind: str = "chunk") -> list[str]:
        return [name for name, what in self.log if what == kind]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made._gate.set()
    made.scheduler.close()


def finished(*requests: Request) -> None:
    for request in requests:
        assert request.over.wait(PATIENCE)


def test_between_two_chunks_every_reply_goes_on_for_a_slice(bench: Bench) -> None:
    replies = [bench.add(name, steps=5 * SLICE_TOKENS) for name in "ab"]
    prompt = bench.add("long", chunks=4, rows=1000)
    bench.go()
    finished(*replies, prompt)
    first, last = (f([i for i, entry in enumerate(bench.log) if entry == ("long", "chunk")]) for f in (min, max))
    between: list[int] = []
    run = 0
    for name, kind in bench.log[first : last + 1]:
        if name == "long":
            between.append(run)
            run = 0
        elif kind == "step":
            run += 1
    assert all(1 <= steps <= 2 * SLICE_TOKENS for steps in between[1:])
    assert bench.names("step").count("a") == bench.names("step").count("b") == 5 * SLICE_TOKENS


def test_short_prompts_come_first_but_not_twice_before_one_that_has_waited(bench: Bench) -> None:
    requests = [bench.add("long", chunks=4, rows=SHORT + 1)]
    requests += [bench.add(name, chunks=1, rows=SHORT) for name in "xyz"]
    bench.go()
    finished(*requests)
    assert bench.names() == ["x", "long", "y", "long", "z", "long", "long"]


def test_a_prompt_whose_rest_is_short_counts_as_short(bench: Bench) -> None:
    requests = [bench.add("a", chunks=3, rows=SHORT), bench.add("b", chunks=2, rows=SHORT)]
    bench.go()
    finished(*requests)
    assert bench.names() == ["a", "a", "a", "b", "b"]


def in_parts(bench: Bench, name: str, parts: int, **scheduling: Any) -> Request:
    """A request of two large chunks in so many parts each."""
    request = Request()

    def work(sequence: object) -> Generator[int, None, None]:
        for left in (4 * SHORT, 2 * SHORT):
            yield left
            for part in range(parts):
                bench.log.append((name, "chunk"))
                if part < parts - 1:
                    yield WITHIN

    bench.scheduler.submit(Task(request, (), 0, work, Scheduling(**scheduling)))
    return request


def test_a_short_prompt_waits_for_one_part_and_never_for_two_if_none_ran_before(bench: Bench) -> None:
    """The parts of a chunk and short prompts take turns."""
    requests = [in_parts(bench, "long", 4), *(bench.add(name, rows=SHORT) for name in "xy")]
    bench.go()
    finished(*requests)
    assert bench.names() == ["x", "long", "y", "long", *["long"] * 6]


def test_an_urgent_large_chunk_comes_after_the_one_that_is_under_way(bench: Bench) -> None:
    """There is one residual stream."""
    urgent: list[Request] = []
    long = Request()

    def work(sequence: object) -> Generator[int, None, None]:
        for left in (4 * SHORT, 2 * SHORT):
            yield left
            for part in range(3):
                bench.log.append(("long", "chunk"))
                if not urgent:
                    urgent.append(in_parts(bench, "urgent", 2, priority=-1))
                if part < 2:
                    yield WITHIN

    bench.scheduler.submit(Task(long, (), 0, work))
    bench.go()
    finished(long, *urgent)
    finished(*urgent)
    assert bench.names() == [*["long"] * 3, *["urgent"] * 4, *["long"] * 3]


def test_only_short_prompts_that_are_as_urgent_come_between_parts(bench: Bench) -> None:
    requests = [in_parts(bench, "long", 2), bench.add("low", priority=1), bench.add("urgent", priority=-1)]
    bench.go()
    finished(*requests)
    assert bench.names() == ["urgent", *["long"] * 4, "low"]


def test_every_reply_has_a_slice_between_two_parts(bench: Bench) -> None:
    replies = [bench.add(name, steps=20 * SLICE_TOKENS) for name in "ab"]
    long = in_parts(bench, "long", 4)
    bench.go()
    finished(*replies, long)
    parts = [place for place, entry in enumerate(bench.log) if entry == ("long", "chunk")]
    between = [bench.log[a + 1 : b] for a, b in pairwise(parts)]
    assert [sorted(set(entries)) for entries in between] == [[("a", "step"), ("b", "step")]] * 7
    assert [len(entries) for entries in between] == [2 * SLICE_TOKENS] * 7


def test_a_request_that_is_cancelled_within_a_chunk_ends_with_the_part(bench: Bench) -> None:
    request, other = Request(), Request()
    closed: list[str] = []

    def work(sequence: object) -> Generator[int, None, None]:
        yield 4 * SHORT
        try:
            for _ in range(4):
                bench.log.append(("long", "chunk"))
                request.cancel()
                yield WITHIN
        finally:
            closed.append("long")

    bench.scheduler.submit(Task(request, (), 0, work))
    other = in_parts(bench, "other", 2)
    bench.go()
    finished(request, other)
    assert bench.names() == ["long", *["other"] * 4]
    assert closed == ["long"]


def test_urgent_prompts_come_first_and_pass_another_one_eight_times(bench: Bench) -> None:
    requests = [bench.add("low", chunks=12, rows=1000, priority=1), bench.add("urgent", chunks=12, rows=1000)]
    bench.go()
    finished(*requests)
    assert PASSED == 8
    assert bench.names() == ["urgent"] * 8 + ["low"] + ["urgent"] * 4 + ["low"] * 11


def test_a_short_prompt_does_not_come_before_one_that_is_more_urgent(bench: Bench) -> None:
    requests = [bench.add("short", rows=8), bench.add("urgent", chunks=2, rows=1000, priority=-1)]
    bench.go()
    finished(*requests)
    assert bench.names() == ["urgent", "urgent", "short"]


def test_urgent_requests_are_admitted_first_and_pass_another_one_eight_times() -> None:
    bench = Bench(places=1)
    requests = [bench.add("low", priority=5), bench.add("lower", priority=9)]
    requests += [bench.add(f"{number}") for number in range(10)]
    bench.go()
    finished(*requests)
    assert bench.names() == [*"01234567", "low", *"89", "lower"]
    bench.scheduler.close()


def test_what_has_not_begun_by_its_deadline_does_nothing_and_says_so(bench: Bench) -> None:
    late, other = bench.add("late", deadline=5), bench.add("other", deadline=5.5)
    bench.now = 5.0
    bench.go()
    finished(late, other)
    assert bench.names() == ["other"]
    with pytest.raises(TimeLimitError, match="did not begin within 5 s, its deadline, and nothing was done"):
        list(late.events())


def test_a_deadline_counts_until_the_first_chunk_and_no_longer(bench: Bench) -> None:
    """That a request has a sequence already does not count: others may be more urgent."""

    def work(sequence: object) -> Generator[int, None, None]:
        long.put("progress")
        for left in (2000, 1000):
            yield left
            bench.log.append(("long", "chunk"))
            bench.now += 10

    long = Request()
    bench.scheduler.submit(Task(long, (), 0, work, Scheduling(deadline=1, reader_timeout=1000)))
    late = bench.add("late", rows=1000, deadline=1)
    bench.go()
    finished(long, late)
    assert bench.names() == ["long", "long"]
    assert list(long.events()) == ["progress"]
    with pytest.raises(TimeLimitError):
        list(late.events())


def test_a_deadline_ends_the_waiting_for_a_place() -> None:
    """Nothing else happens that would wake the engine's thread."""
    bench = Bench(places=1)
    late = bench.add("late", deadline=0.01)
    bench.scheduler._clock = time.monotonic
    bench.places.free = 0
    bench._gate.set()
    finished(late)
    assert bench.log == []
    bench.scheduler.close()


def test_a_reply_that_lies_unread_for_too_long_ends_and_says_so(bench: Bench) -> None:
    slow = bench.add("slow", steps=100, unread=True, reader_timeout=10)
    bench.go()
    until(lambda: slow.paused, "the reply is made ahead as far as it may")
    events = slow.events()
    for _ in range(3):  # whatever is taken gives it as long again
        bench.rounds()
        bench.now += 9
        bench.rounds()
        assert not slow.over.is_set()
        next(events)
    bench.rounds()
    bench.now += 10
    bench.scheduler.wake()
    finished(slow)
    assert [next(events) for _ in range(AHEAD)] == list(range(3, AHEAD + 3))
    with pytest.raises(TimeLimitError, match="lay unread for 10 s and was ended"):
        next(events)
    assert len(bench.names("step")) == AHEAD + 3


def test_a_reader_that_waits_for_the_engine_is_not_hurried(bench: Bench) -> None:
    request = Request()

    def work(sequence: object) -> Generator[int, None, None]:
        yield 8
        for step in range(3):
            yield 0
            bench.now += 100
            bench.log.append(("slow", "step"))
            request.put(step)
            until(lambda: not request.unread, "the reader takes it")
            bench.scheduler.wake()  # the thread looks at the time between two steps

    bench.scheduler.submit(Task(request, (), 0, work, Scheduling(reader_timeout=1)))
    bench.go()
    assert list(request.events()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 1.5), ("priority", True), ("deadline", 0), ("deadline", "5"), ("reader_timeout", float("nan"))],
)
def test_what_a_request_asks_of_the_scheduler_is_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is .*; allowed: a (whole )?number"):
        Scheduling(**{name: value})


def test_ctrl_c_ends_the_waiting_for_a_place_and_no_work_is_done(bench: Bench) -> None:
    request, other = bench.add("waiting", steps=3), bench.add("other", steps=3)

    def interrupt() -> None:
        until(request.reading.locked, "it waits")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt), request.reading:
            list(request.events())
    request.cancel()  # as the engine does for whoever leaves
    bench.go()
    finished(request, other)
    assert set(bench.names("step")) == {"other"}


def test_only_the_main_thread_looks_up_from_its_waiting() -> None:
    """Where signals are handled; all others sleep until there is something."""
    timeouts: list[float | None] = []

    class Events:
        def get(self, timeout: float | None) -> Any:
            timeouts.append(timeout)
            return ["event"]

    request = Request()
    request._batches = Events()  # type: ignore[assignment]
    next(request.events())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, request.events()).result()
    assert timeouts == [0.05, None]


def test_a_request_that_is_cancelled_while_it_waits_does_nothing(bench: Bench) -> None:
    request = bench.add("a", steps=3)
    request.cancel()
    bench.go()
    finished(request)
    assert bench.log == []
    assert list(request.events()) == []


def test_a_cancelled_reply_ends_with_the_step(bench: Bench) -> None:
    request = Request()
    closed = []

    def work(sequence: object) -> Generator[int, None, None]:
        try:
            for step in range(1000):
                yield 0
                bench.log.append(("a", "step"))
                if step == 2:
                    request.cancel()
        finally:
            closed.append(True)

    bench.scheduler.submit(Task(request, (), 0, work))
    bench.go()
    finished(request)
    assert bench.names("step") == ["a"] * 3
    assert closed == [True]


def test_a_reply_that_nobody_reads_pauses_and_goes_on_when_it_is_read(bench: Bench) -> None:
    slow, other = bench.add("slow", steps=3 * AHEAD, unread=True), bench.add("other", steps=100)
    bench.go()
    finished(other)
    until(lambda: bench.names("step").count("slow") == AHEAD, "the reply is made ahead as far as it may")
    assert not slow.over.is_set()
    assert list(slow.events()) == list(range(3 * AHEAD))


def test_one_that_waits_for_a_place_lets_what_pauses_go_on() -> None:
    bench = Bench(places=2)  # one is taken by what holds the bench up
    slow = bench.add("slow", steps=3 * AHEAD, unread=True)
    bench.go()
    until(lambda: bench.names("step").count("slow") == AHEAD, "the reply is made ahead as far as it may")
    others = [bench.add(name, steps=1) for name in "ab"]
    third = bench.add("c", steps=1)
    finished(*others, third)
    assert list(slow.events()) == list(range(3 * AHEAD))
    bench.scheduler.close()


@pytest.mark.parametrize(("error", "abandoned"), [(DeviceError("injected"), 0), (ZeroDivisionError(), 1)], ids=str)
def test_a_failure_is_that_requests_alone(bench: Bench, error: Exception, abandoned: int) -> None:
    """After an error that is not one of Lily's own nobody knows in which state its sequence is."""
    request = Request()

    def work(sequence: object) -> Generator[int, None, None]:
        yield 8
        raise error

    bench.scheduler.submit(Task(request, (), 0, work))
    other = bench.add("other", steps=3)
    bench.go()
    finished(request, other)
    with pytest.raises(type(error)):
        list(request.events())
    assert list(other.events()) == [0, 1, 2]
    assert len(bench.places.abandoned) == abandoned
    until(lambda: bench.places.free == 8, "every place is free again")


def test_closing_waits_for_calls_cancels_what_nobody_reads_and_refuses_the_rest(bench: Bench) -> None:
    bench.go()
    unread = bench.add("unread", steps=50, unread=True)
    until(lambda: bench.names("step").count("unread") == AHEAD, "the reply is made ahead as far as it may")
    called, started, go_on = Request(), Event(), Event()

    def work(sequence: object) -> Generator[int, None, None]:
        for step in range(3 * AHEAD):
            yield 0
            started.set()
            go_on.wait(PATIENCE)
            called.put(step)

    with called.reading:  # as a call does
        bench.scheduler.submit(Task(called, (), 0, work))
        assert started.wait(PATIENCE)
        waiting = bench.add("waiting", steps=1)
        with ThreadPoolExecutor(2) as pool:
            closing = [pool.submit(bench.scheduler.close) for _ in range(2)]
            until(lambda: bench.scheduler._closing, "it is being closed")
            go_on.set()
            for each in closing:
                each.result(PATIENCE)
        assert list(called.events()) == list(range(3 * AHEAD))
    assert bench.released.is_set()
    assert list(unread.events()) == list(range(AHEAD))
    late = bench.add("late")
    finished(late)
    for refused in (waiting, late):
        with pytest.raises(InvalidRequestError, match="the engine is closed"):
            list(refused.events())


def test_nobody_waits_for_a_thread_that_has_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.add("first", steps=1)
    monkeypatch.setattr(bench.scheduler, "_chunk", lambda: 1 // 0)
    bench.go()
    finished(first)
    assert bench.released.wait(PATIENCE)
    late = bench.add("late")
    finished(late)
    for request in (first, late):
        with pytest.raises(DeviceError, match=r"thread has failed \(ZeroDivisionError.*open another one"):
            list(request.events())
    assert isinstance(bench.scheduler.failure, ZeroDivisionError)


def test_the_thread_waits_when_there_is_nothing_to_do(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.go()
    rounds: list[bool] = []
    hear: Callable[..., None] = bench.scheduler._hear
    monkeypatch.setattr(bench.scheduler, "_hear", lambda *, wait: (rounds.append(wait), hear(wait=wait)))
    bench.scheduler.wake()
    finished(bench.add("a", steps=2))
    until(lambda: len(rounds) > 0 and rounds[-1], "it waits")
    count = len(rounds)
    finished(bench.add("b"))
    until(lambda: rounds[-1], "it waits again")
    assert len(rounds) <= count + 4
