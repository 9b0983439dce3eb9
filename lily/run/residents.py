# SPDX-License-Identifier: Apache-2.0
"""The sequences that stay on the device between requests, which of them a request gets, and what gives way.

A request goes on in the sequence that shares the most with it, if that costs the other conversation nothing worth
mentioning: it *is* that conversation, or what is lost is quickly read again.  Otherwise what they share is copied into
another sequence, so that A, B, A finds A as it was.  Sequences in use are never touched.  Of the others that gives way
whose loss costs least: tokens to be read again, by the number of requests since it was used.
A request is admitted when the running ones and it fit with all tokens that they may come to hold, so none fails in its
middle; idle sequences give way as memory is really needed, when a sequence grows.
With a shelf (shelf.py) what gives way is written to disk first, and read from there where that saves more than a copy.
Not handled: which points of a sequence are kept (points.py); sharing memory between sequences.
"""

from __future__ import annotations

from collections import abc, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lily.errors import DeviceError
from lily.run.chunks import kept_points
from lily.run.history import common_prefix
from lily.run.points import Marks
from lily.run.runner import Runner
from lily.run.saved import Pieces, Saved
from lily.run.sequence import Sequence
from lily.run.shelf import Shelf

CHEAP = 512
"""Tokens that are read again as quickly as a sequence is copied."""

_RESTORED = 16  # tokens that come from disk in the time in which one is read: about 60,000 a second, a fast GPU 4,000
_REMEMBERED = 16  # sequences that had to give way, in order to say so


def _nothing() -> Pieces:
    yield from ()


@dataclass(eq=False)
class Resident:
    """A sequence, and the tokens that its user may fill it with: 0 while nobody uses it.

    shared: how many tokens the stored sequences had in common with the prompt. reason: why so much of the prompt was
    there, and no more. fetch: reads what is on disk of the prompt into the sequence, if that is to be done; a generator
    that stops after every piece.
    """

    sequence: Sequence
    reserved: int = 0
    points: int = 0  # that it may come to keep, while it is used
    used: int = field(default=0)  # grows with every use
    turn: int = 0  # where the reply to the last message of the user began
    shared: tuple[int, ...] = ()
    reason: str = "cold"
    fetch: abc.Callable[[], Pieces] = _nothing


class Slot(NamedTuple):
    """What is to be known of a resident from outside: tokens and states that it holds, and their bytes."""

    tokens: int
    states: int
    nbytes: int
    in_use: bool


class _Loss(NamedTuple):
    """What may give way: a kept point of a sequence, or without ``point`` all of it."""

    value: float
    resident: Resident
    point: int | None


class Residents:
    """At most ``count`` sequences, of together at most ``budget`` bytes on the device, kept states included.

    ``sequence_bytes(tokens, points)``: what a sequence takes that holds so many.
    """

    def __init__(
        self, runner: Runner, *, count: int, budget: int, max_context: int, marks: Marks,
        sequence_bytes: abc.Callable[[int, int], int], shelf: Shelf | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._count, self._budget, self._bytes = runner, count, budget, sequence_bytes
        self._max_context, self._marks, self._shelf = max_context, marks, shelf
        self._all: list[Resident] = [Resident(self._new())]
        self._gone: deque[list[int]] = deque(maxlen=_REMEMBERED)  # tokens of what had to give way
        self._uses = 0
        runner.recorder.before_growth = self._before_growth

    @property
    def latest(self) -> Resident:
        """The one that was used last."""
        return max(self._all, key=lambda r: r.used)

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [resident.sequence for resident in self._all]

    @property
    def slots(self) -> list[Slot]:
        """How things stand. For any thread: every figure is true at some moment while they are looked at."""
        return [
            Slot(len(r.sequence.tokens), len(r.sequence.points), r.sequence.held, r.reserved > 0)
            for r in list(self._all)
        ]

    def _new(self) -> Sequence:
        return self._runner.sequence(max_context=self._max_context)

    # ---- use
    def take(self, tokens: abc.Sequence[int], reserve: int) -> Resident | None:
        """A sequence for a request with the prompt ``tokens`` that may come to hold ``reserve``; None: not now.

        What it shares with the prompt is there; ``Sequence.resume`` goes to it.
        """
        shared = {r: common_prefix(r.sequence.tokens, tokens) for r in self._all}
        points = {r: r.sequence.point(tokens, in_use=r.reserved > 0, shared=shared[r])[0] for r in self._all}
        best = max(self._all, key=lambda r: (points[r], not r.reserved, r.used))
        chosen = self._from_shelf(tokens, reserve, shared.values(), points[best])
        if chosen is not None:
            return chosen
        goes_on = not best.reserved and self._goes_on(best, shared[best], points[best])
        source = best if points[best] else None
        # Where there is no memory for both, the one that shares most is gone on with all the same.
        places = [best] if goes_on else [self._spare(source), None if best.reserved else best]
        chosen = next((r for r in places if r is not None and self._admits(r, source or r, tokens, reserve)), None)
        if chosen is None:
            return None
        departs = max(shared.values())
        reason = "hit" if source and goes_on else self._reason(tokens, departs, points[best])
        if not goes_on:
            self._gives_way(chosen)
        if chosen is not best and points[best] > points.get(chosen, 0):
            self._copy(best, chosen.sequence, tokens)
        chosen.reason, chosen.fetch = reason, _nothing
        return self._taken(chosen, tokens, shared.values())

    def _taken(self, chosen: Resident, tokens: abc.Sequence[int], shared: abc.Iterable[int]) -> Resident:
        self._uses += 1
        chosen.used, chosen.turn, chosen.shared = self._uses, self._marks.turn(tokens), tuple(shared)
        return chosen

    def _from_shelf(
        self, tokens: abc.Sequence[int], reserve: int, shared: abc.Iterable[int], point: int
    ) -> Resident | None:
        """A sequence that is to be filled from disk.

        None if that saves little against the ``point`` tokens that are there, or if there is no sequence for it now.
        """
        if self._shelf is None:
            return None
        saved, position = self._shelf.match(tokens)
        if saved is None or position - point <= max(CHEAP, position // _RESTORED):
            return None
        chosen = self._spare(None)
        if chosen is None or not self._admits(chosen, chosen, tokens, reserve, points=len(saved.points)):
            return None
        self._gives_way(chosen)
        chosen.sequence.reset()
        departs = common_prefix(saved.tokens, tokens)
        chosen.reason = "hit" if position == saved.latest else self._reason(tokens, departs, position)
        chosen.fetch = partial(self._fetch, self._shelf, saved, chosen, position)
        return self._taken(chosen, tokens, (*shared, departs))

    def _fetch(self, shelf: Shelf, saved: Saved, chosen: Resident, position: int) -> Pieces:
        with suppress(DeviceError):  # it is said where memory is needed
            self._runner.reserve(chosen.sequence, position + 1)
            yield from shelf.restore(saved, chosen.sequence, position)
        if not chosen.sequence.tokens:
            chosen.reason = "cold"

    # ---- on disk
    def shelve(self) -> None:
        """Everything that nobody uses is to be on disk, too."""
        for resident in self._all:
            if not resident.reserved:
                self._shelve(resident)

    def _shelve(self, resident: Resident) -> None:
        if self._shelf is not None:
            self._shelf.keep(resident.sequence)

    def give_back(self, resident: Resident) -> None:
        """Its request has ended; nothing of it is in flight."""
        resident.reserved = resident.points = 0

    def _goes_on(self, best: Resident, shared: int, point: int) -> bool:
        """Whether the prompt is the next one of that conversation, or going on there loses little.

        A template drops what was thought since the user spoke last, so the next turn departs where that turn's reply
        began; a prompt that departs before it is another conversation.
        """
        return 0 < best.turn <= shared or best.sequence.latest - point <= min(CHEAP, point)

    def _reason(self, tokens: abc.Sequence[int], shared: int, point: int) -> str:
        """Why ``point`` tokens of the prompt are there, of ``shared`` ones; nothing of the text is told."""
        lost = max((common_prefix(gone, tokens) for gone in self._gone), default=0)
        if lost > shared + CHEAP:
            return "evicted"
        if not point and shared <= CHEAP:
            return "cold"
        return "hit" if shared == len(tokens) else f"diverged at token {shared}"

    def _copy(self, source: Resident, target: Sequence, tokens: abc.Sequence[int]) -> None:
        target.reset()
        try:
            self._runner.reserve(target, len(tokens) + 1)
        except DeviceError:  # then it is read once more, or said where it is needed
            return
        target.copy_prefix(source.sequence, tokens, in_use=source.reserved > 0)

    # ---- what gives way
    def _gives_way(self, resident: Resident) -> None:
        """What it holds is about to be lost."""
        self._shelve(resident)
        if len(resident.sequence.tokens) > CHEAP:
            self._gone.append(list(resident.sequence.tokens))

    def _spare(self, best: Resident | None) -> Resident | None:
        """One whose contents matter least: empty, new, or of the least loss; ``best`` only if there is no other."""
        idle = [r for r in self._all if not r.reserved]
        empty = next((r for r in idle if not r.sequence.tokens), None)
        if empty is not None:
            return empty
        if len(self._all) < self._count:
            try:
                self._all.append(Resident(self._new()))
                return self._all[-1]
            except DeviceError:  # there is no memory for one more: those that are there will do
                self._count = len(self._all)
        others = [r for r in idle if r is not best]
        return min(others or idle, key=self._loss, default=None)

    def _loss(self, resident: Resident) -> tuple[float, int]:
        """What it costs if a sequence is lost: tokens to be read again, by its age; of equal losses the older one."""
        return resident.sequence.latest / self._age(resident), resident.used

    def _age(self, resident: Resident) -> int:
        return self._uses - resident.used + 1

    def _admits(
        self, chosen: Resident, kept: Resident, tokens: abc.Sequence[int], reserve: int, *, points: int = 0
    ) -> bool:
        """Reserves ``reserve`` tokens for ``chosen`` if they fit beside all that the others in use may come to hold.

        What it needs at once is there then beside ``kept``, too, from which its beginning may be copied. points: those
        that it gets before it begins, beside its own.
        """
        policy = self._runner.policy
        points += len(kept_points(tokens, 0, policy, self._marks, (len(tokens),))) + len(chosen.sequence.points)
        promised = sum(self._filled(r.reserved, r.points) for r in self._all if r.reserved and r is not chosen)
        if promised and promised + self._filled(reserve, points) > self._budget:
            return False  # one that runs alone always fits, but for points beyond the usual ones
        if not self._make_room(chosen, min(len(tokens) + 1, reserve), points, {chosen, kept}) and kept is not chosen:
            return False
        chosen.reserved, chosen.points = reserve, points
        return True

    def _before_growth(self, sequence: Sequence, tokens: int) -> None:
        """The sequence is about to hold ``tokens``: what its memory was promised against gives way."""
        resident = next((r for r in self._all if r.sequence is sequence), None)
        if resident is not None:
            self._make_room(resident, tokens, resident.points, {resident})

    def _make_room(self, chosen: Resident, tokens: int, points: int, kept: set[Resident]) -> bool:
        """Whether ``chosen`` may hold ``tokens`` now; of those that nobody uses, all but ``kept`` give way."""

        def held() -> int:
            grown = max(self._filled(tokens, points), chosen.sequence.held)
            return grown + sum(r.sequence.held for r in self._all if r is not chosen)

        losses = self._losses([r for r in self._all if not r.reserved and r not in kept])
        while held() > self._budget and (loss := next(losses, None)) is not None:
            if loss.point is not None:
                self._shelve(loss.resident)
                loss.resident.sequence.points.pop(loss.point, None)
            else:
                self._gives_way(loss.resident)
                self._all.remove(loss.resident)
                self._runner.release(loss.resident.sequence)
        return held() <= self._budget

    def _losses(self, idle: list[Resident]) -> abc.Iterator[_Loss]:
        """What may give way, the least loss first: kept points by what lies between them and the one before."""
        found = []
        for resident in idle:
            age, before = self._age(resident), 0
            for point in sorted(resident.sequence.points):
                found.append(_Loss((point - before) / age, resident, point))
                before = point
            found.append(_Loss(resident.sequence.latest / age, resident, None))
        # Of equal losses points first, then the sequence that was used longest ago.
        return iter(sorted(found, key=lambda loss: (loss.value, loss.point is None, loss.resident.used)))

    def _filled(self, tokens: int, points: int) -> int:
        """Bytes of a sequence that came to hold ``tokens`` and ``points``."""
        return self._bytes(min(self._runner.policy.kv_tokens(tokens), self._max_context), points)
