# SPDX-License-Identifier: Apache-2.0
"""Several requests at once, each with a sequence of its own: every one gets what it would get alone, bit for bit.

Not handled: who runs when (test_scheduler.py), which sequence a request gets (test_residents.py).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count as counter
from typing import Any
from unittest import mock

import pytest
from engine_device import Target, cpu_only
from engine_harness import TINY, device_buffers, open_engine, policy
from models import tiny_model
from waiting import PATIENCE

from lily.engine import Completion, Engine
from lily.errors import DeviceError, InvalidRequestError, TimeLimitError
from lily.run.points import MESSAGE_START
from lily.run.reply import Reply
from lily.run.requests import Scheduling

HOW: dict[str, Any] = {"seed": 7, "ignore_eos": True, "logprobs": 2}
# Edges that short prompts cross.
SMALL: dict[str, Any] = {"chunks": ((0, 16),), "buckets": (8, 16), "kv_step": 32, "message_gap": 1}
SYSTEM = [i * 37 % 900 + 1 for i in range(33)]


def prompt(number: int, length: int = 20) -> list[int]:
    return [(number * 101 + i * 13) % 900 + 1 for i in range(length)]


@pytest.fixture(scope="module")
def several(device: Target) -> Iterator[Engine]:
    with policy(**SMALL, part_rows=8), open_engine(tiny_model(), max_context=256, sequences=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(device: Target) -> Iterator[Any]:
    """What a request gives in an engine that knows nothing yet, its chunks in one piece."""
    with policy(**SMALL), open_engine(tiny_model(), max_context=256) as engine:

        def ask(tokens: list[int], count: int) -> Completion:
            for resident in engine._residents._all:
                resident.sequence.reset()
            return engine.generate(tokens, max_tokens=count, **HOW)

        yield ask


def same(got: Completion, want: Completion) -> bool:
    return (got.token_ids, got.logprobs, got.text) == (want.token_ids, want.logprobs, want.text)


def test_replies_in_turn_are_those_of_each_alone(several, cold, device):
    """More of them than there are sequences, read one chunk at a time by one thread; a text is scored in between."""
    count = device.pick(40, 6)
    streams = [several.stream(prompt(n), max_tokens=count, **HOW) for n in range(5)]
    last: dict[int, Any] = {}
    scored = several.score(prompt(9, 40)).logprobs.tobytes()
    for _ in range(count):
        for number, stream in enumerate(streams):
            chunk = next(stream, None)
            last[number] = chunk or last[number]
    assert all(same(last[n].completion, cold(prompt(n), count)) for n in range(5))
    assert several.score(prompt(9, 40)).logprobs.tobytes() == scored


def test_calls_of_many_threads_get_their_own_answers(several, cold, device):
    count, calls = device.pick(30, 4), device.pick(8, 4)
    with ThreadPoolExecutor(calls) as pool:
        got = list(pool.map(lambda n: several.generate(prompt(n, 5 + 9 * n), max_tokens=count, **HOW), range(calls)))
    assert all(same(got[n], cold(prompt(n, 5 + 9 * n), count)) for n in range(calls))


def test_tasks_of_an_event_loop_use_one_engine(several, cold, device):
    count = device.pick(20, 4)

    async def ask_all() -> list[Completion]:
        ask = [asyncio.to_thread(several.generate, prompt(n), max_tokens=count, **HOW) for n in range(4)]
        return await asyncio.gather(*ask)

    assert all(same(got, cold(prompt(n), count)) for n, got in enumerate(asyncio.run(ask_all())))


def test_streams_of_an_event_loop_change_their_thread_with_every_chunk(several, cold, device):
    """As ``run_in_executor`` has it, with fewer threads than streams."""
    count = device.pick(20, 4)

    async def read(number: int, pool: ThreadPoolExecutor) -> Completion:
        loop = asyncio.get_running_loop()
        stream = several.stream(prompt(number), max_tokens=count, **HOW)
        while (chunk := await loop.run_in_executor(pool, next, stream, None)).completion is None:
            pass
        return chunk.completion

    async def read_all() -> list[Completion]:
        with ThreadPoolExecutor(2) as pool:
            return await asyncio.gather(*(read(n, pool) for n in range(4)))

    assert all(same(got, cold(prompt(n), count)) for n, got in enumerate(asyncio.run(read_all())))


def test_priority_and_deadline_of_a_call_reach_the_scheduler(several, cold, device):
    submit, seen = several._scheduler.submit, []

    with mock.patch.object(several._scheduler, "submit", lambda task: (seen.append(task.scheduling), submit(task))):
        scheduling = Scheduling(priority=-3, deadline=PATIENCE, reader_timeout=PATIENCE)
        session = several.session(template_kwargs={"enable_thinking": False})
        several.generate(prompt(1), max_tokens=1, scheduling=scheduling, **HOW)
        several.chat([{"role": "user", "content": "a"}], max_tokens=1, scheduling=scheduling)
        session.send("a", max_tokens=1, scheduling=scheduling)
        several.generate(prompt(1), max_tokens=1, **HOW)
    assert seen == [scheduling] * 3 + [Scheduling()]


def test_a_call_that_does_not_begin_in_time_raises(several, device, monkeypatch):
    monkeypatch.setattr(several._scheduler, "_clock", counter().__next__)  # a second passes whenever it is looked at
    several._scheduler.wake()
    with pytest.raises(TimeLimitError, match=r"did not begin within 0\.5 s"):
        several.generate(prompt(1), max_tokens=1, scheduling=Scheduling(deadline=0.5))


def test_another_conversation_in_between_loses_nothing(several, cold, device):
    """A, B, A: the first goes on where it was."""
    count = device.pick(12, 3)
    first = several.generate(prompt(1, 40), max_tokens=count, **HOW)
    several.generate(prompt(2, 40), max_tokens=count, **HOW)
    longer = [*prompt(1, 40), *first.token_ids, 5, 6, 7]
    again = several.generate(longer, max_tokens=count, **HOW)
    assert again.cached_tokens >= 32
    assert same(again, cold(longer, count))


def test_a_common_beginning_is_read_once(several, cold, device):
    """The second conversation has the first one's system message, also while the first is under way."""
    count, start = device.pick(40, 4), several.tokenizer.encode(MESSAGE_START)
    one, two = ([*SYSTEM, *start, *prompt(number)] for number in (3, 4))
    stream = several.stream(one, max_tokens=count, **HOW)
    first = next(stream)
    second = several.generate(two, max_tokens=count, **HOW)
    assert second.cached_tokens == len(SYSTEM)
    assert same(second, cold(two, count))
    rest = list(stream)
    assert same(rest[-1].completion, cold(one, count))
    assert first.token_ids == rest[-1].completion.token_ids[:1]


def test_a_failure_or_a_score_leaves_the_other_conversations(several, cold, device, monkeypatch):
    long = prompt(5, device.pick(200, 40))  # costs more to read again than what other tests have left
    several.generate(long, max_tokens=2, **HOW)
    several.score(prompt(6, 30))
    following = Reply.next

    def failing(reply: Reply) -> Any:
        if reply.limit == 3:
            raise DeviceError("injected")
        return following(reply)

    monkeypatch.setattr(Reply, "next", failing)
    with pytest.raises(DeviceError, match="injected"):
        several.generate(prompt(7), max_tokens=3, **HOW)
    monkeypatch.undo()
    again = several.generate([*long, 1], max_tokens=2, **HOW)
    assert again.cached_tokens >= 32
    assert same(again, cold([*long, 1], 2))


def test_lists_that_another_request_drops_are_recorded_again(several, cold, device):
    """In the middle of a reply, with steps of it in flight."""
    count = device.pick(40, 6)
    stream = several.stream(prompt(8), max_tokens=count, **HOW)
    next(stream)
    several.score(prompt(9, 40), top_k=9)  # makes room for larger results, for which every recorded list goes
    assert same(list(stream)[-1].completion, cold(prompt(8), count))


def test_requests_for_which_there_is_no_memory_wait(cold, device):
    count = device.pick(20, 3)
    with policy(**SMALL), open_engine(tiny_model(), max_context=256, sequences=3) as engine:
        engine._residents._budget = engine._residents._bytes(64)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda n: engine.generate(prompt(n), max_tokens=count, **HOW), range(4)))
        assert all(same(got[n], cold(prompt(n), count)) for n in range(4))
        assert len(engine._residents.sequences) == 1


def test_a_callback_may_use_the_engine(several, cold, device):
    """It runs in the caller's thread."""
    got = []

    def reading(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        if done == total:
            got.append(several.generate(prompt(1), max_tokens=2, **HOW))

    stream = several.stream(prompt(2), max_tokens=2, on_prompt=reading, **HOW)
    assert same(stream.completion(), cold(prompt(2), 2))
    assert same(got[0], cold(prompt(1), 2))


@pytest.mark.parametrize("count", [0, 65, "4", True])
def test_the_number_of_sequences_is_checked(device, count):
    with pytest.raises(InvalidRequestError, match=r"sequences is .*; allowed: a whole number from 1 to 64"):
        open_engine(TINY, sequences=count)


# ---- processes ------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, lily
engine = lily.Engine(sys.argv[1], device="cpu", threads=1)
stream = engine.stream([1, 2, 3], max_tokens=100, ignore_eos=True)
next(stream)
if os.fork() == 0:
    for call in (lambda: engine.generate([1]), lambda: engine.score([1, 2])):
        try:
            call()
        except lily.DeviceError as error:
            print(error, flush=True)
    engine.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(len(list(stream)), engine.generate([1], max_tokens=2, ignore_eos=True).completion_tokens)
"""
EXIT = """
import sys, lily
engine = lily.Engine(sys.argv[1], device="cpu", threads=1)
stream = engine.stream([1, 2, 3], max_tokens=1000, ignore_eos=True)
print(next(stream).token_ids != [])
"""
EXIT_OF_READERS = """
import sys, threading, lily
engine = lily.Engine(sys.argv[1], device="cpu", threads=1, sequences=2)
begun = threading.Event()
def read(count):
    for chunk in engine.stream([1, 2, 3], max_tokens=count, ignore_eos=True, seed=1):
        begun.set()
    if chunk.completion:
        print(chunk.completion.completion_tokens)
threading.Thread(target=read, args=(4000,), daemon=True).start()
begun.wait()
threading.Thread(target=read, args=(20,)).start()
"""


def python(code: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-W", "ignore", "-c", code, str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@cpu_only("what a process may do is the same on every device")
def test_a_forked_process_is_told_to_open_an_engine_of_its_own(device):
    status, lines = python(FORK)
    assert status == 0, lines
    assert len(lines) == 3
    assert all(line.endswith("which forked; open an engine in this process") for line in lines[:2])
    assert lines[2] == "99 2"


@cpu_only("what a process may do is the same on every device")
def test_a_program_ends_while_daemons_read_and_waits_for_other_threads(device):
    """What a daemon reads is given up, or has come to its end by then."""
    status, lines = python(EXIT_OF_READERS)
    assert status == 0, lines
    assert "20" in lines
    assert set(lines) <= {"20", "4000"}


@cpu_only("what a process may do is the same on every device")
def test_a_thread_that_cannot_be_started_leaves_nothing_on_the_device(device, monkeypatch):
    start = threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "lily engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    with device_buffers() as made, pytest.raises(RuntimeError, match="can't start new thread"):
        open_engine(TINY)
    assert made
    assert not any(buffer.handle for buffer in made)


@cpu_only("what a process may do is the same on every device")
def test_a_program_ends_while_a_stream_is_unread(device):
    assert python(EXIT) == (0, ["True"])
