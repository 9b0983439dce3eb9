# SPDX-License-Identifier: Apache-2.0
"""The sequences that stay on the device between requests, and which of them a request gets.

A request goes on in the sequence that shares the most with it. Where most of that sequence is something else (another
conversation with the same system message), what they share is copied into another one, so that neither loses its
memory. Sequences in use are never touched; of the others the one that was used longest ago gives way.
Not handled: how much of a sequence can be reused (sequence.py); sharing memory between sequences.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from lily.errors import DeviceError
from lily.run.runner import Runner
from lily.run.sequence import Sequence


@dataclass(eq=False)
class Resident:
    """A sequence, and the tokens that its user may fill it with: 0 while nobody uses it."""

    sequence: Sequence
    reserved: int = 0
    used: int = field(default=0)  # grows with every use


class Residents:
    """At most ``count`` sequences, of together at most ``budget`` bytes on the device.

    ``sequence_bytes(tokens)``: what a sequence takes that holds so many.
    """

    def __init__(
        self, runner: Runner, *, count: int, budget: int, max_context: int, snapshots: int,
        sequence_bytes: abc.Callable[[int], int],
    ) -> None:  # fmt: skip
        self._runner, self._count, self._budget, self._bytes = runner, count, budget, sequence_bytes
        self._max_context, self._snapshots = max_context, snapshots
        self._all: list[Resident] = [Resident(self._new())]
        self._uses = 0

    @property
    def latest(self) -> Sequence:
        """The one that was used last."""
        return max(self._all, key=lambda r: r.used).sequence

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [resident.sequence for resident in self._all]

    def _new(self) -> Sequence:
        return self._runner.sequence(max_context=self._max_context, snapshots=self._snapshots)

    # ---- use
    def take(self, tokens: abc.Sequence[int], reserve: int) -> Resident | None:
        """A sequence for a request with the prompt ``tokens`` that may come to hold ``reserve``; None: not now.

        What it shares with the prompt is there; ``Sequence.resume`` goes to it.
        """
        matches = {r: r.sequence.match(tokens, in_use=r.reserved > 0) for r in self._all}
        best = max(self._all, key=lambda r: (matches[r], not r.reserved, r.used))
        shared = matches[best]
        in_place = not best.reserved and 2 * shared >= len(best.sequence.tokens)
        # Where there is no memory for both, the one that shares most is gone on with all the same.
        places = [best] if in_place else [self._spare(best if shared else None), None if best.reserved else best]
        chosen = next((r for r in places if r is not None and self._make_room(r, best, reserve)), None)
        if chosen is None:
            return None
        if chosen is not best and shared > matches.get(chosen, 0):
            self._copy(best, chosen.sequence, tokens)
        self._uses += 1
        chosen.reserved, chosen.used = reserve, self._uses
        return chosen

    def give_back(self, resident: Resident) -> None:
        """Its request has ended; nothing of it is in flight."""
        resident.reserved = 0

    def _spare(self, best: Resident | None) -> Resident | None:
        """One whose contents matter least: empty, new, or used longest ago; ``best`` only if there is no other."""
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
        others = sorted((r for r in idle if r is not best), key=lambda r: r.used)
        return others[0] if others else next(iter(idle), None)

    def _make_room(self, chosen: Resident, kept: Resident, reserve: int) -> bool:
        """Whether ``reserve`` tokens fit beside ``kept`` and those in use; others are released if need be."""

        def needed() -> int:
            tokens = {r: reserve if r is chosen else r.reserved for r in self._all}
            return sum(self._filled(tokens[r]) if tokens[r] else r.sequence.nbytes for r in self._all)

        idle = sorted((r for r in self._all if not r.reserved and r not in (chosen, kept)), key=lambda r: r.used)
        while needed() > self._budget and idle:
            gone = idle.pop(0)
            self._all.remove(gone)
            self._runner.release(gone.sequence)
        return needed() <= self._budget or len(self._all) == 1

    def _filled(self, tokens: int) -> int:
        """Bytes of a sequence that came to hold ``tokens``."""
        return self._bytes(min(self._runner.policy.kv_tokens(tokens), self._max_context))

    def _copy(self, source: Resident, target: Sequence, tokens: abc.Sequence[int]) -> None:
        target.reset()
        try:
            self._runner.reserve(target, len(tokens) + 1)
        except DeviceError:  # then it is read once more, or said where it is needed
            return
        target.copy_prefix(source.sequence, tokens, in_use=source.reserved > 0)
