# SPDX-License-Identifier: Apache-2.0
"""What happens beside every token: events in batches, the end of a turn.

Not handled: who has a turn, and readers that wait (test_scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lily.run._schedule import Outbox

FOR_EVER = 1e9  # seconds


def outbox(given: list[list[object]], *, hold: float, ahead: int = 100, batch: int = 4) -> Outbox:
    return Outbox(given.append, ahead=ahead, batch=batch, hold=hold)


def never() -> bool:
    return False


def test_events_that_follow_at_once_are_handed_over_a_few_at_a_time() -> None:
    given: list[list[object]] = []
    box = outbox(given, hold=math.inf)
    for event in range(10):
        box.put(event, more=True)
    assert given == [[0, 1, 2, 3], [4, 5, 6, 7]]
    box.flush()
    box.flush()
    assert given == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert box.made == 10


def test_an_event_that_nothing_follows_is_handed_over_with_what_waits() -> None:
    given: list[list[object]] = []
    box = outbox(given, hold=math.inf)
    box.put("a", more=True)
    box.put("b")
    box.put("c")
    assert given == [["a", "b"], ["c"]]


def test_nothing_waits_longer_than_it_may() -> None:
    given: list[list[object]] = []
    box = outbox(given, hold=0.0)
    for event in "abc":
        box.put(event, more=True)
    assert given == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_turn_ends_with_its_last_token(tokens: int) -> None:
    box = outbox([], hold=0.0)
    for _ in range(2):
        box.begin_turn(tokens, FOR_EVER, never)
        assert [box.turn_over() for _ in range(tokens)] == [False] * (tokens - 1) + [True]


def test_a_turn_ends_with_its_time() -> None:
    box = outbox([], hold=0.0)
    box.begin_turn(100, 0.0, never)
    assert box.turn_over()


def test_a_turn_without_a_limit_ends_when_something_has_come() -> None:
    box, asked = outbox([], hold=0.0), iter([False] * 1000 + [True])
    box.begin_turn(0, 0.0, lambda: next(asked))
    assert [box.turn_over() for _ in range(1001)] == [False] * 1000 + [True]


def cancel(box: Outbox) -> None:
    box.cancelled = True


def lie_unread(box: Outbox) -> None:
    for event in range(5):
        box.put(event)


@pytest.mark.parametrize("stop", [cancel, lie_unread])
def test_a_turn_ends_when_the_request_is_cancelled_or_its_reader_has_to_read(stop: Callable[[Outbox], None]) -> None:
    box = outbox([], hold=0.0, ahead=5)
    box.begin_turn(100, FOR_EVER, never)
    assert not box.turn_over()
    stop(box)
    assert box.turn_over()


def test_what_lies_unread_counts_from_what_was_taken_and_not_for_one_that_is_hurried() -> None:
    box = outbox([], hold=0.0, ahead=5)
    lie_unread(box)
    assert box.pause()
    assert box.paused
    box.taken = 1
    assert not box.pause()
    box.put("more")
    assert box.pause()
    box.hurried = True
    assert not box.pause()
