# SPDX-License-Identifier: Apache-2.0
"""Plans, their recorded lists, and the memory that sequences share while they run: scratch, logits, the sampler's.

A plan is made once for its key, and recorded twice for a sequence: for state slots A→B and B→A.
Not handled: running them (runner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from lily.checkpoint.config import ModelConfig
from lily.device.device import CommandList, Device, free
from lily.device.weights import Weights
from lily.errors import DeviceError
from lily.plan import Builder, Plan, decode_plan, prefill_plan, sample_plan
from lily.plan.memory import common_buffers
from lily.policy import Policy
from lily.run.host_steps import record
from lily.run.sequence import Sequence
from lily.sampling import SamplingParams

MAX_RECORDED = 256  # lists kept; ``score`` with ever new numbers of top ids, or replies of many lengths, make so many

SAMPLED, GREEDY, LOGPROBS = range(3)  # options of a plan that samples

Pair = tuple[CommandList, CommandList]  # for state slots A→B and B→A


class Key(NamedTuple):
    """What a plan was made for."""

    kind: str  # prefill, decode, sample or score
    rows: int
    option: int  # how to sample, or how many top ids to score
    kv_tokens: int  # of the KV cache that it covers
    part: int = 0  # of the parts in which a chunk goes


class Recorder:
    """Recorded lists of any number of sequences on the same weights.

    ``generation`` grows whenever lists are freed: whoever holds some has to ask for them again then.
    """

    def __init__(self, device: Device, config: ModelConfig, policy: Policy, weights: Weights) -> None:
        self.device, self.config, self.policy, self.weights = device, config, policy, weights
        self.buffers = device.buffers(common_buffers(config, policy), shared=False)
        self._plans: dict[Key, Plan] = {}
        self._recorded: dict[tuple[Sequence, Key], Pair] = {}
        self._dropped: list[CommandList] = []  # not free yet
        self.generation = 0
        self.before_growth: Callable[[Sequence, int], object] = lambda sequence, tokens: None
        """Called with a sequence and the tokens that it is about to hold, so that others may give way."""

    @property
    def nbytes(self) -> int:
        """Device bytes in use, without weights and sequences."""
        return sum(b.nbytes for b in self.buffers.values())

    # ---- which plan
    def prefill_keys(self, sequence: Sequence, rows: int) -> list[Key]:
        """The parts of a chunk."""
        return self._parts(Key("prefill", self.policy.bucket(rows), 0, sequence.kv_tokens))

    def score_keys(self, sequence: Sequence, rows: int, top: int) -> list[Key]:
        """The parts of a chunk that is scored."""
        return self._parts(Key("score", self.policy.bucket(rows), top, sequence.kv_tokens))

    def _parts(self, key: Key) -> list[Key]:
        parts = min(self.policy.parts(key.rows), self.config.num_layers)
        return [key._replace(part=part) for part in range(parts)]

    def decode_key(self, sequence: Sequence) -> Key:
        """Decodes from here on. How attention is split among groups, and so its bits, follows from what a plan covers.

        Hence that follows from the position and not from the cache, which is as large as an earlier request needed
        (architecture.md, Reuse).
        """
        covered = min(self.policy.kv_tokens(len(sequence.tokens) + 1), sequence.max_context)
        return Key("decode", 1, 0, covered)

    def sample_key(self, sequence: Sequence, params: SamplingParams, *, masked: bool = False) -> Key:
        """masked: whether some of the tokens are held to a mask, of which the greedy plan knows nothing."""
        option = LOGPROBS if params.logprobs is not None else GREEDY if params.greedy and not masked else SAMPLED
        return Key("sample", 1, option, sequence.kv_tokens)

    # ---- lists
    def lists(self, sequence: Sequence, *keys: Key) -> list[Pair]:
        """The recorded lists of each plan for ``sequence``."""
        if len(self._recorded) > MAX_RECORDED:
            self.forget()
        plans = [self._plan(key) for key in keys]
        host = self.policy.ablated("resident-routing")  # the only plans in which the host has a part
        self.reserve("scratch", max(plan.scratch_bytes for plan in plans), shared=host)
        for key, plan in zip(keys, plans, strict=True):
            if (sequence, key) not in self._recorded:
                a = self._record(plan, sequence, 0)
                try:
                    self._recorded[sequence, key] = (a, self._record(plan, sequence, 1))
                except BaseException:
                    a.free()
                    raise
        return [self._recorded[sequence, key] for key in keys]

    def _plan(self, key: Key) -> Plan:
        if key not in self._plans:
            if len(self._plans) > MAX_RECORDED:
                self._plans.clear()
            b = Builder(self.config, self.policy, rows=key.rows, kv_tokens=key.kv_tokens, weights=self.weights.map)
            if key.kind == "decode":
                self._plans[key] = decode_plan(b)
            elif key.kind == "sample":
                self._plans[key] = sample_plan(b, greedy=key.option == GREEDY, logprobs=key.option == LOGPROBS)
            else:
                whole = prefill_plan(b, score_top=key.option if key.kind == "score" else None)
                keys = self._parts(key)
                self._plans.update(zip(keys, whole.parts(len(keys)), strict=True))
        return self._plans[key]

    def _record(self, plan: Plan, sequence: Sequence, slot: int) -> CommandList:
        return record(self.device, plan, {**self.weights.buffers, **self.buffers, **sequence.bound(slot)})

    def forget(self, sequence: Sequence | None = None) -> None:
        """Frees the lists of ``sequence``, or all, after waiting for whatever is in flight.

        A list is out of reach before it is freed: what breaks in (Ctrl-C) leaves the rest for the next call.
        """
        for place in [place for place in self._recorded if sequence in (None, place[0])]:
            self._dropped += self._recorded.pop(place)
        if self._dropped:
            self.generation += 1
            with suppress(DeviceError):  # of whose submission it was, it will hear of it itself
                self.device.wait(self.device.submit([]))
        while self._dropped:
            self._dropped[-1].free()
            self._dropped.pop()

    def reserve_kv(self, sequence: Sequence, tokens: int) -> None:
        """Grows the KV cache of ``sequence`` to hold ``tokens``; lists that name the old one are dropped.

        DeviceError where there is no memory for it; the sequence is as before then.
        """
        if tokens > sequence.kv_tokens:
            self.before_growth(sequence, tokens)
            self.forget(sequence)
            self._plans.clear()
            sequence.grow(tokens)

    def reserve(self, name: str, nbytes: int, *, shared: bool = True) -> None:
        """Makes the buffer ``name`` at least ``nbytes`` large; its contents are lost and recorded lists dropped."""
        old = self.buffers.get(name)
        if old is None or old.nbytes < nbytes:
            self.forget()
            if old is not None:  # first out of the way: the two may not fit beside each other
                self.buffers.pop(name).free()
            self.buffers[name] = self.device.buffer(nbytes, shared=shared)

    def close(self) -> None:
        """Frees lists and buffers; nothing may be in flight."""
        self.forget()
        free(self.buffers)
