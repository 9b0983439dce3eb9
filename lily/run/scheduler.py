# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: it owns the device and shares it among requests.

A request is a generator that does a unit of work each time it is resumed, a chunk of its prompt or a slice of its reply
(``Outbox.turn_over`` says where that ends), and says how much of the prompt is left. Chunks and slices of replies take
turns: between two chunks every reply that somebody reads goes on for SLICE_TOKENS tokens or SLICE_SECONDS, whichever
comes first. Of the prompts those of the lowest priority come first, and of these one that is short (512 tokens are
left, or fewer), but never twice in a row before one that has waited longer. A large chunk goes in parts of as much work
as 512 rows are; between them the slices go on, and short prompts, but no other large chunk is begun. So a short prompt
waits for the part that runs and a slice of each reply, and once more so long if another short one ran before that part.
A long one waits for the chunk that runs, and then in its turn.
Nobody starves: after PASSED turns of more urgent requests it is the turn of the first one that they passed. That holds
for sequences and for chunks; every reply gets its slices, whatever its priority. Who runs gives its sequence to nobody.
Not handled: what a request does (engine.py), which sequence it gets (residents.py), several rows in one step.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import abc
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from lily.errors import DeviceError, InvalidRequestError, LilyError, TimeLimitError
from lily.run.requests import Request, Scheduling
from lily.run.residents import Resident, Residents
from lily.run.runner import WITHIN
from lily.run.sequence import Sequence

SLICE_TOKENS = 32
SLICE_SECONDS = 0.25
PASSED = 8  # turns that more urgent requests have before the one that has waited longest

T = TypeVar("T")
Work = Generator[int, None, None]
"""Does a unit of work whenever it is resumed; yields how many tokens of the prompt are left to be run.

Between two parts of a chunk it yields WITHIN. Of a reply it makes tokens until the request's ``turn_over``.
"""


@dataclass(eq=False)
class Task:
    """What the engine has to do for a request. ``reserve``: tokens that its sequence may come to hold."""

    request: Request
    tokens: abc.Sequence[int]
    reserve: int
    start: Callable[[Resident], Work]
    scheduling: Scheduling = field(default_factory=Scheduling)
    resident: Resident | None = None
    work: Work | None = None
    left: int = 0  # tokens of the prompt; 0: the reply has begun
    within: bool = False  # a chunk of it has been begun, and goes in parts
    passed: int = 0  # turns that others had before it, since its own last one
    begun: bool = False  # a chunk of the prompt was run
    due: float | None = None  # when it is ended: by its deadline, then by the patience with its reader
    taken: int = 0  # what its reader had taken when ``due`` was set


@dataclass(frozen=True)
class _Call(Generic[T]):
    """Something that the engine's thread is to do between two units."""

    function: Callable[[], T]
    result: Future[T]

    def run(self) -> None:
        try:
            self.result.set_result(self.function())
        except BaseException as error:
            self.result.set_exception(error)


class Scheduler:
    """Runs tasks in a thread of its own until it is closed; ``release`` is called by that thread in the end."""

    def __init__(
        self, residents: Residents, *, abandon: Callable[[Sequence], object], release: Callable[[], object], short: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``short``: tokens of a prompt that goes in one part, if no more of it are left (``Policy.part_rows``)."""
        self._residents, self._abandon, self._release, self._clock = residents, abandon, release, clock
        self._short = short
        self._process = os.getpid()
        self._news: SimpleQueue[Task | _Call[Any] | None] = SimpleQueue()  # None: something has changed
        self._waiting: list[Task] = []  # in the order in which they came
        self._running: list[Task] = []
        self._can_admit = True  # something has changed since a waiting request found no sequence
        self._closing = self._at_once = self._ended = False
        self.failure: BaseException | None = None
        """What has ended the thread before it was closed."""
        self._thread = threading.Thread(target=self._run, name="lily engine", daemon=True)
        self._thread.start()
        _open.add(self)

    # ---- any thread
    def submit(self, task: Task) -> None:
        """Has ``task`` done; what comes of it goes through its request. DeviceError in a process that was forked."""
        self._check_process()
        if task.scheduling.deadline is not None:
            task.due = self._clock() + task.scheduling.deadline
        task.request.wake = self.wake
        task.request.over.clear()
        self._news.put(task)
        if self._ended:
            self._refuse_rest()

    def wake(self) -> None:
        """Something has changed: a request was cancelled, or its reader has come back."""
        self._news.put(None)

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` gives, or raises, in the engine's thread, which runs it between two units of work.

        It must not take long: nothing else is done meanwhile.
        """
        self._check_process()
        result: Future[T] = Future()
        self._news.put(_Call(function, result))
        if self._ended:
            self._refuse_rest()
        while not result.done():  # in slices, so that Ctrl-C breaks in
            wait([result], timeout=SLICE_SECONDS)
        return result.result()

    def settle(self, request: Request) -> None:
        """Waits until the engine has let go of ``request``; the engine's own thread and a forked one do not wait."""
        if threading.current_thread() is not self._thread and os.getpid() == self._process:
            request.over.wait()

    def close(self, *, at_once: bool = False) -> None:
        """Ends the thread: replies that nobody is reading are cancelled, calls are waited for, unless ``at_once``."""
        self._closing = True
        self._at_once |= at_once
        self.wake()
        if threading.current_thread() is not self._thread and os.getpid() == self._process:
            self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeviceError(
                f"this engine belongs to process {self._process}, which forked; open an engine in this process"
            )

    # ---- the engine's thread
    def _run(self) -> None:
        try:
            while self._running or self._waiting or not self._closing:
                self._hear(wait=not self._work_left())
                self._drop_cancelled()
                self._drop_overdue()
                self._admit()
                self._chunk()
                self._slices()
        except BaseException as error:  # a fault of this module: nobody may wait for a thread that is gone
            self.failure = error
        finally:
            self._ended = True
            for task in self._tasks:
                task.request.finish(self._refusal())
            self._refuse_rest()
            self._release()

    def _refusal(self) -> LilyError:
        if self.failure is None:
            return InvalidRequestError("the engine is closed")
        return DeviceError(f"the engine's thread has failed ({self.failure!r}); close this engine and open another one")

    def _refuse_rest(self) -> None:
        """Of two threads that come here with the last of the news one finds it."""
        with suppress(Empty):
            while True:
                news = self._news.get_nowait()
                if isinstance(news, Task):
                    news.request.finish(self._refusal())
                elif news is not None:
                    news.result.set_exception(self._refusal())

    @property
    def _tasks(self) -> list[Task]:
        return [*self._waiting, *self._running]

    def _work_left(self) -> bool:
        return bool(self._waiting and self._can_admit) or any(not _paused(task) for task in self._running)

    def _hear(self, *, wait: bool) -> None:
        """Takes in what has come; ``wait`` for it if there is nothing else to do, or until a request is overdue."""
        if wait:
            times = [task.due for task in self._tasks if task.due is not None]
            with suppress(Empty):
                self._hear_one(self._news.get(timeout=max(0.0, min(times) - self._clock()) if times else None))
        while not self._news.empty():
            self._hear_one(self._news.get())

    def _hear_one(self, news: Task | _Call[Any] | None) -> None:
        self._can_admit = True
        if isinstance(news, Task):
            self._waiting.append(news)
        elif news is not None:
            news.run()

    def _drop_cancelled(self) -> None:
        if self._closing:
            self._hurry()  # whoever closes the engine may be the one who does not read
        for task in self._tasks:
            if self._closing and task.resident is None:
                self._end(task, self._refusal())
            elif task.request.cancelled or self._at_once or (self._closing and task.request.idle):
                task.request.cancelled = True
                self._end(task)

    def _drop_overdue(self) -> None:
        """Ends what has not begun by its deadline, and what its reader has left unread for too long."""
        now = self._clock()
        for task in self._tasks:
            if task.begun:
                _watch_reader(task, now)
            if task.due is not None and now >= task.due:
                self._end(task, _overdue(task))

    def _admit(self) -> None:
        """Gives waiting requests their sequences, in their order: who is first is not overtaken by smaller ones."""
        while self._waiting:
            task = _foremost(self._waiting)
            try:
                task.resident = self._residents.take(task.tokens, task.reserve)
            except BaseException as error:
                self._end(task, error)
                continue
            if task.resident is None:
                self._hurry()
                self._can_admit = False
                return
            _has_its_turn(task, task, self._waiting)
            self._waiting.remove(task)
            self._running.append(task)
            task.work = task.start(task.resident)
            self._advance(task)

    def _hurry(self) -> None:
        """Replies that nobody reads on hold what others wait for: they go on."""
        for task in self._running:
            task.request.hurried = True

    def _chunk(self) -> None:
        """Runs a chunk of one prompt, or a part of it. Of chunks that go in parts one is under way at a time."""
        prompts = [task for task in self._running if task.left]
        if not prompts:
            return
        first = next((task for task in prompts if task.within), None) or _foremost(prompts)
        as_urgent = [task for task in prompts if task.scheduling.priority <= first.scheduling.priority]
        short = next((task for task in as_urgent if task.left <= self._short), first)
        chosen = first if first.passed else short
        _has_its_turn(chosen, first, prompts)
        if not chosen.begun:
            chosen.begun, chosen.due = True, None
        self._turn(chosen, 1)  # after its last chunk the first token

    def _slices(self) -> None:
        """Every reply goes on for a slice."""
        for task in [task for task in self._running if not task.left]:
            self._slice(task)

    def _slice(self, task: Task) -> None:
        if not _paused(task) and not task.request.cancelled:
            alone = len(self._running) == 1 and not self._waiting
            self._turn(task, 0 if alone else SLICE_TOKENS)

    def _turn(self, task: Task, tokens: int) -> None:
        """A unit of ``task``, with so many tokens of its reply; 0: until something has come."""
        task.request.begin_turn(tokens, SLICE_SECONDS, lambda: not self._news.empty())
        self._advance(task)
        task.request.flush()

    def _advance(self, task: Task) -> None:
        """One unit of ``task``, or its end."""
        assert task.work is not None
        try:
            left = next(task.work)
            task.within = left == WITHIN
            task.left = task.left if task.within else left
        except StopIteration:
            self._end(task)
        except BaseException as error:
            self._end(task, error)

    def _end(self, task: Task, error: BaseException | None = None) -> None:
        """Done, cancelled or failed: only its own sequence is concerned."""
        if task in self._waiting:
            self._waiting.remove(task)
        if task in self._running:
            self._running.remove(task)
        if task.work is not None:
            work, task.work = task.work, None
            try:
                work.close()
            except BaseException as problem:  # ending it has failed
                error = error or problem
        if task.resident is not None:
            if error is not None and not isinstance(error, LilyError):  # nobody knows how far it came
                with suppress(DeviceError):
                    self._abandon(task.resident.sequence)
            self._residents.give_back(task.resident)
            task.resident = None
        self._can_admit = True
        task.request.finish(error)


_open: WeakSet[Scheduler] = WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the program, while its threads can still be waited for."""
    for scheduler in list(_open):
        scheduler.close(at_once=True)


def _foremost(tasks: list[Task]) -> Task:
    """Of tasks in the order in which they came: who was passed too often, or the first of the lowest priority."""
    starved = next((task for task in tasks if task.passed >= PASSED), None)
    return starved or min(tasks, key=lambda task: task.scheduling.priority)


def _has_its_turn(chosen: Task, first: Task, tasks: list[Task]) -> None:
    """``first`` would have been the next one. Counts the turn for it, and for all that are less urgent."""
    starved = first.passed >= PASSED
    for task in tasks:
        less_urgent = task.scheduling.priority > chosen.scheduling.priority
        task.passed = 0 if starved else task.passed + (less_urgent or task is first)
    chosen.passed = 0


def _watch_reader(task: Task, now: float) -> None:
    """Its time runs while something lies unread, and begins again when its reader takes anything."""
    timeout, request = task.scheduling.reader_timeout, task.request
    if timeout is None or not request.unread:
        task.due = None
    elif task.due is None or task.taken != request.taken:
        task.due, task.taken = now + timeout, request.taken


def _overdue(task: Task) -> TimeLimitError:
    if task.begun:
        return TimeLimitError(
            f"the reply lay unread for {task.scheduling.reader_timeout:g} s and was ended; read on sooner, or give it "
            "a larger reader_timeout"
        )
    return TimeLimitError(
        f"the request did not begin within {task.scheduling.deadline:g} s, its deadline, and nothing was done for it; "
        "other requests have the engine: make it again later, or give it a later deadline"
    )


def _paused(task: Task) -> bool:
    """Whether its reader should read first."""
    return not task.left and task.request.pause()
