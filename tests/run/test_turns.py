# SPDX-License-Identifier: Apache-2.0
"""The queue of requests: order, cancellation, holders that are idle, and what breaks in at any line.

Not handled: what a request does in its turn (tests/engine).
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from waiting import PATIENCE

from lily.run import turns as turns_module
from lily.run.turns import Request, Turns


class Idle(Request):
    """A request that could go on and nobody asks it to."""

    idle = True


def take(turns: Turns, request: Request, **how: Any) -> bool:
    """A whole turn; whether it came to it."""
    with request.alive:
        try:
            return turns.enter(request, **how)
        finally:
            turns.leave(request)


def waiting(turns: Turns, pool: ThreadPoolExecutor, request: Request, order: list[Request]) -> Future[bool]:
    """A thread that takes a turn, waiting in the queue when this returns; ``order`` gets the request."""

    def work() -> bool:
        mine = take(turns, request)
        order.append(request)
        return mine

    future = pool.submit(work)
    while request not in turns._queue:
        assert not future.done()
    return future


def test_requests_come_in_the_order_of_their_arrival() -> None:
    turns, held, order = Turns(), Request(), []
    requests = [Request() for _ in range(5)]
    with ThreadPoolExecutor(5) as pool, held.alive:
        assert turns.enter(held)
        futures = [waiting(turns, pool, request, order) for request in requests]
        assert order == []
        turns.leave(held)
        assert [future.result(PATIENCE) for future in futures] == [True] * 5
    assert order == requests


def test_one_that_is_cancelled_while_it_waits_leaves_at_once() -> None:
    turns, held, order = Turns(), Request(), []
    first, second = Request(), Request()
    with ThreadPoolExecutor(2) as pool, held.alive:
        assert turns.enter(held)
        futures = [waiting(turns, pool, request, order) for request in (first, second)]
        second.cancelled = True
        turns.cancelled(second)
        assert futures[1].result(PATIENCE) is False
        assert order == [second]
        turns.leave(held)
        assert futures[0].result(PATIENCE) is True


def test_one_that_is_cancelled_before_it_comes_never_gets_a_turn() -> None:
    request = Request()
    request.cancelled = True
    assert take(Turns(), request) is False


def test_an_idle_holder_is_told_by_the_one_that_is_next() -> None:
    turns, held, told = Turns(), Idle(), []

    def on_idle(holder: Request) -> None:
        told.append(holder)
        if len(told) == 3:
            turns.leave(held)

    with held.alive:
        assert turns.enter(held)
        assert take(turns, Request(), on_idle=on_idle)
    assert told == [held] * 3


def test_a_holder_that_becomes_idle_wakes_the_one_that_is_next() -> None:
    turns, held = Turns(), Request()
    with ThreadPoolExecutor(1) as pool, held.alive:
        assert turns.enter(held)
        request = Request()
        future = pool.submit(take, turns, request, on_idle=turns.leave)
        while request not in turns._queue:
            assert not future.done()
        held.__class__ = Idle
        turns.notify()
        assert future.result(PATIENCE) is True


def test_one_that_is_gone_without_a_word_holds_up_nobody() -> None:
    turns, gone = Turns(), Request()
    with gone.alive:
        assert turns.enter(gone)
    assert take(turns, Request()) is True


@pytest.mark.parametrize("line", range(1, 40))
def test_what_breaks_in_at_any_line_leaves_the_queue_working(line: int) -> None:
    """An interrupt at each line that a turn runs, and at each that the wait for one runs."""
    turns, calls = Turns(), iter(range(1, 1000))

    def tracing(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != turns_module.__file__:
            return None
        if event == "line" and next(calls) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracing

    def interrupted(request: Request) -> None:
        before = sys.gettrace()
        sys.settrace(tracing)
        try:
            take(turns, request, on_idle=turns.leave)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)

    held = Idle()
    with held.alive:
        assert turns.enter(held)
        interrupted(Request())
    thread = threading.Thread(target=take, args=[turns, Request()], daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
