# SPDX-License-Identifier: Apache-2.0
"""One sequence on one device: memory, recorded lists, prompt chunks and decode steps.  No text, no policy of requests.

The device holds the tokens' KV rows and two state slots.  ``Runner.tokens`` are the tokens that the current slot has
consumed.  Earlier points can be resumed: the other slot (one chunk or one step before) and snapshots, which own copies
of the state; KV rows up to such a point stay valid until ``resume`` drops what lies beyond it.
Not handled: several sequences at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from lily import structs
from lily.checkpoint.config import ModelConfig
from lily.device.device import Buffer, CommandList, Device
from lily.errors import ContextLengthError, DeviceError
from lily.kernels import OUTPUT_RING, STATUS_NONFINITE
from lily.plan import Builder, Plan, decode_plan, prefill_plan, sample_plan
from lily.plan.memory import SLOTTED, StateLayout, kv_layers, kv_row_bytes, step_buffers
from lily.plan.weights_map import WeightsMap
from lily.policy import Policy
from lily.run._submit import DecodePipeline
from lily.run.host_steps import record, run_ahead
from lily.sampling import SamplingParams, fill_request


@dataclass(frozen=True)
class Token:
    """A sampled token as the device reported it."""

    id: int
    position: int
    stopped: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


_SAMPLED, _GREEDY, _LOGPROBS = range(3)
_ATTEMPTS = 3  # at a chunk of the prompt
_MAX_RECORDED = 64  # plans kept; `score` with ever new numbers of top ids, or replies of many lengths, make so many


class _Key(NamedTuple):
    """What a plan was made for."""

    kind: str
    rows: int
    option: int  # how to sample, or how many top ids to score
    reach: int  # tokens of the KV cache that it covers


@dataclass
class _Snapshot:
    position: int
    state: np.ndarray[Any, np.dtype[np.uint8]]


class Runner:
    """Runs prompts and decode steps of one sequence.

    ``max_context`` bounds the tokens of the sequence; ``snapshots`` is how many state copies are kept.
    """

    def __init__(
        self, device: Device, config: ModelConfig, policy: Policy, weights: WeightsMap,
        weight_buffers: dict[str, Buffer], *, max_context: int, vocab: int, snapshots: int = 4,
    ) -> None:  # fmt: skip
        self.device, self.config, self.policy, self.weights = device, config, policy, weights
        self.max_context, self.vocab = max_context, vocab
        self.tokens: list[int] = []
        self._slot = 0  # the slot that holds the current state
        self._previous = -1  # position of the other slot's state, -1 if it holds none
        self._snapshots: list[_Snapshot] = []
        self._snapshot_limit = snapshots
        self._capacity = 0
        # Of the running reply: tokens asked for, read, and that the lists in use can give; the last id.
        self._limit = self._produced = self._burst = self._last = 0
        self._logprobs = False
        self._sampling = _GREEDY
        self._calibrated = not policy.calibration_rows
        self._plans: dict[_Key, Plan] = {}
        self._recorded: dict[_Key, tuple[CommandList, CommandList]] = {}
        self._buffers: dict[str, Buffer] = dict(weight_buffers)
        state = StateLayout.of(config, policy).nbytes
        small = step_buffers(config, policy, 0)
        sizes = {f"{base}.{slot}": small[f"{base}.in"] for base in ("step", "ids") for slot in "AB"}
        sizes |= {f"state.{slot}": state for slot in "AB"}
        sizes |= {n: size for n, size in small.items() if n.split(".")[0] not in SLOTTED and n != "history"}
        try:
            for name, size in sizes.items():
                self._buffers[name] = device.buffer(size)
            self.reserve(1)
        except BaseException:
            for name in self._buffers.keys() - weight_buffers.keys():
                self._buffers.pop(name).free()
            raise
        outputs = self._buffers["outputs"]
        self._outputs = outputs.array(structs.OUTPUT)
        self._pipeline = DecodePipeline(
            device.handle, device.function("lily_submit"), device.function("lily_wait"), outputs.address,
            structs.OUTPUT.itemsize, OUTPUT_RING,
        )  # fmt: skip

    # ---- memory
    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds now."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Device bytes in use, weights included."""
        return sum(b.nbytes for b in self._buffers.values())

    def reserve(self, tokens: int) -> None:
        """Grows the KV cache to hold ``tokens``; recorded lists that name it are dropped.

        DeviceError where there is no memory for it; the sequence is as before then.
        """
        if tokens <= self._capacity:
            return
        capacity = max(tokens, min(self.policy.kv_tokens(tokens), self.max_context))
        row, used = kv_row_bytes(self.config), len(self.tokens)
        sizes = {f"kv.{layer}.{which}": capacity * row for layer in kv_layers(self.config) for which in "kv"}
        sizes["history"] = step_buffers(self.config, self.policy, capacity)["history"]
        grown: dict[str, Buffer] = {}
        try:
            for name, size in sizes.items():
                grown[name] = self.device.buffer(size)
                if name in self._buffers:
                    old = self._buffers[name].bytes
                    keep = len(old) if name == "history" else used * row
                    grown[name].bytes[:keep] = old[:keep]
        except BaseException:
            for buffer in grown.values():
                buffer.free()
            raise
        self._forget_plans()
        replaced = [self._buffers[name] for name in grown if name in self._buffers]
        self._buffers |= grown
        self._capacity = capacity
        for buffer in replaced:
            buffer.free()

    def _forget_plans(self) -> None:
        self._drop_lists()
        self._plans.clear()

    def _drop_lists(self) -> None:
        for pair in self._recorded.values():
            for item in pair:
                item.free()
        self._recorded.clear()

    def _lists(self, *keys: _Key) -> list[tuple[CommandList, CommandList]]:
        """The recorded lists of each plan, for state slots A→B and B→A. Nothing may be in flight when one is new."""
        if len(self._recorded) > _MAX_RECORDED:
            self._forget_plans()
        plans = [self._plan(key) for key in keys]
        self._allocate("scratch", max(plan.scratch_bytes for plan in plans))
        for key, plan in zip(keys, plans, strict=True):
            if key not in self._recorded:
                a = record(self.device, plan, self._bound(0))
                try:
                    self._recorded[key] = (a, record(self.device, plan, self._bound(1)))
                except BaseException:
                    a.free()
                    raise
        return [self._recorded[key] for key in keys]

    def _plan(self, key: _Key) -> Plan:
        if key not in self._plans:
            kind, rows, option, reach = key
            b = Builder(self.config, self.policy, rows=rows, kv_tokens=reach, weights=self.weights)
            if kind == "decode":
                self._plans[key] = decode_plan(b)
            elif kind == "sample":
                self._plans[key] = sample_plan(b, greedy=option == _GREEDY, logprobs=option == _LOGPROBS)
            else:
                self._plans[key] = prefill_plan(b, score_top=option if kind == "score" else None)
        return self._plans[key]

    def _allocate(self, name: str, nbytes: int) -> None:
        """Makes the buffer ``name`` at least ``nbytes`` large; its contents are lost and recorded lists dropped."""
        old = self._buffers.get(name)
        if old is None or old.nbytes < nbytes:
            self._drop_lists()
            if old is not None:  # first out of the way: the two may not fit beside each other
                del self._buffers[name]
                old.free()
            self._buffers[name] = self.device.buffer(nbytes)

    def _bound(self, slot: int) -> dict[str, Buffer]:
        names = dict(self._buffers)
        for base in SLOTTED:
            names[f"{base}.in"] = self._buffers[f"{base}.{'AB'[slot]}"]
            names[f"{base}.out"] = self._buffers[f"{base}.{'BA'[slot]}"]
        return names

    def _prefill_key(self, rows: int) -> _Key:
        return _Key("prefill", self.policy.bucket(rows), 0, self._capacity)

    def _decode_key(self) -> _Key:
        """Decode from here on. How attention is split among groups, and so its bits, follows from a plan's reach.

        Hence the reach follows from the position and not from the cache, which is as large as an earlier request
        needed (architecture.md, Reuse).
        """
        return _Key("decode", 1, 0, min(self.policy.kv_tokens(len(self.tokens) + 1), self.max_context))

    def _sample_key(self) -> _Key:
        return _Key("sample", 1, self._sampling, self._capacity)

    # ---- reuse of earlier work
    def resume(self, prompt: Sequence[int]) -> int:
        """Goes to the latest point that ``prompt`` shares, leaving at least one token to run; returns its position."""
        shared = common_prefix(self.tokens, prompt)
        limit = min(shared, len(prompt) - 1)
        candidates = [(s.position, "snapshot") for s in self._snapshots]
        if self.policy.rows_invariant:  # elsewhere only states on chunk edges give a cold run's bits
            candidates = [(len(self.tokens), "current"), (self._previous, "previous"), *candidates]
        # Of equal positions the first: it needs no copy.
        position, where = max((c for c in candidates if 0 < c[0] <= limit), key=itemgetter(0), default=(0, "start"))
        if where == "previous":
            self._slot ^= 1
        elif where == "snapshot":
            saved = next(s for s in self._snapshots if s.position == position)
            self._state()[:] = saved.state
        elif where == "start":
            self._state()[:] = 0
        if where != "current":
            self._previous = -1
        self.tokens = list(prompt[:position])
        self._snapshots = [s for s in self._snapshots if s.position <= position]
        return position

    def reset(self) -> None:
        """Forgets the sequence: zero state, no snapshots."""
        self._snapshots.clear()
        self.tokens = []
        self._previous = -1
        self._state()[:] = 0

    def abandon(self) -> None:
        """As ``reset``, when something broke in at an unknown place: waits for all that may still run first."""
        self._pipeline.drain()
        self.device.wait(self.device.submit([]))
        self.reset()

    def _state(self, slot: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._buffers[f"state.{'AB'[self._slot if slot is None else slot]}"].bytes

    def snapshot(self) -> None:
        """Copies the current state, to be resumed later; the oldest copies beyond the limit go."""
        position = len(self.tokens)
        if self._snapshot_limit and position and all(s.position != position for s in self._snapshots):
            self._snapshots.append(_Snapshot(position, self._state().copy()))
            self._snapshots = self._snapshots[-self._snapshot_limit :]

    # ---- prompt
    def prefill(self, chunk: Sequence[int]) -> None:
        """Appends ``chunk`` (at most the largest bucket) and waits."""
        self.reserve(len(self.tokens) + len(chunk))
        self._run_chunk(chunk, self._prefill_key(len(chunk)))

    def _run_chunk(self, chunk: Sequence[int], *keys: _Key) -> int:
        """Appends ``chunk`` with these plans and waits; returns its ticket. When that fails the sequence is as before.

        A submission that the device gave up (macOS stops GPU work that keeps the screen waiting; the device then cuts
        it into smaller pieces) is made again: the state slot that it reads from is intact.
        """
        self._calibrate(chunk)
        start, lists = len(self.tokens), self._lists(*keys)
        for attempt in range(_ATTEMPTS):
            try:
                ticket = self._submit_chunk(chunk, lists)
                self.device.wait(ticket)
                return ticket
            except DeviceError as error:
                self._take_back(start)
                if not error.again or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _calibrate(self, chunk: Sequence[int]) -> None:
        """Before the first large chunk a part of it, from which the device learns how long its work may be at a time.

        What it gives is dropped: chunk edges must follow from the tokens alone (architecture.md, Reuse).
        """
        rows = self.policy.calibration_rows
        if self._calibrated or len(chunk) <= rows:
            return
        self._calibrated = True
        start = len(self.tokens)
        self._run_chunk(chunk[:rows], self._prefill_key(rows))
        self._take_back(start)

    def _take_back(self, start: int) -> None:
        """Forgets the chunk that began at ``start``; the slot with the state before it is intact."""
        self._slot ^= 1
        self._previous = -1
        del self.tokens[start:]

    def _submit_chunk(self, chunk: Sequence[int], lists: Sequence[tuple[CommandList, CommandList]]) -> int:
        start, slot = len(self.tokens), self._slot
        step = self._buffers[f"step.{'AB'[slot]}"].array(structs.STEP)
        step[0] = (start, len(chunk), 0, 0)
        self._buffers[f"ids.{'AB'[slot]}"].array(np.int32)[: len(chunk)] = chunk
        self._buffers["history"].array(np.int32)[start : start + len(chunk)] = chunk
        self._buffers["counts"].bytes[:] = 0  # of the reply to come; a failed attempt may have counted its token
        self._previous = start
        self._slot ^= 1
        self.tokens.extend(chunk)
        items = [pair[slot] for pair in lists]
        run_ahead(items)
        return self.device.submit(items)

    # ---- reply
    def start(self, chunk: Sequence[int], params: SamplingParams, stop_ids: Sequence[int], limit: int) -> None:
        """Runs the prompt's last ``chunk`` with its sampling; ``next`` then keeps up to two steps in flight.

        At most ``limit`` tokens will come. The chunk is waited for: the step after the next one overwrites the slot
        from which it could be repeated.
        """
        self._limit, self._produced = limit, 0
        prompt = len(self.tokens) + len(chunk)
        self.reserve(min(prompt + limit, self.policy.kv_tokens(prompt + 1)))
        fill_request(
            self._buffers["request"].array(structs.REQUEST)[0], self._buffers["bias.ids"].array(np.int32),
            self._buffers["bias.values"].array(np.float32), params, vocab=self.vocab, stop_ids=stop_ids,
        )  # fmt: skip
        self._logprobs = params.logprobs is not None
        self._sampling = _LOGPROBS if self._logprobs else _GREEDY if params.greedy else _SAMPLED
        ticket = self._run_chunk(chunk, self._prefill_key(len(chunk)), self._sample_key())
        self._begin(limit)
        self._pipeline.adopt(ticket)

    def _begin(self, limit: int) -> None:
        """Points the pipeline at the lists for this position; nothing is in flight."""
        key = self._decode_key()
        decode, sample = self._lists(key, self._sample_key())
        room = key.reach - len(self.tokens)  # the first token of a request needs none
        handles = [[item.handle for item in (decode[slot], sample[slot])] for slot in (0, 1)]
        depth = 1 if self.policy.ablated("handoff") else 2
        first = 1 if self._produced == 0 else 0
        self._burst = min(limit, room + first)
        self._pipeline.begin(handles[0], handles[1], self._slot, depth, self._produced, self._burst)

    def next(self) -> Token | None:
        """The next token of the reply; None after ``limit`` tokens. DeviceError: a failure, non-finite logits."""
        if self._produced >= self._limit:
            return None
        if self._pipeline.finished >= self._burst:
            self._reach_further()
        result = self._pipeline.next()
        if result is None:
            self._check_failure()
            return None
        id, position, status, logprob = result
        if self._produced:
            self._consumed()
        if status == STATUS_NONFINITE:
            self.stop()
            self.reset()
            raise DeviceError(
                f"the logits at position {position} are not finite: the weights are damaged, or a kernel is wrong; "
                "check the checkpoint's files against their published hashes"
            )
        self._produced += 1
        self._last = id
        return self._token(id, position, status, logprob)

    def _token(self, id: int, position: int, status: int, logprob: float) -> Token:
        if not self._logprobs:
            return Token(id, position, status != 0)
        record = self._outputs[(self._produced - 1) % OUTPUT_RING]
        n = int(record["top_count"])
        top = tuple(zip(record["top_ids"][:n].tolist(), record["top_logprobs"][:n].tolist(), strict=True))
        return Token(id, position, status != 0, logprob, top)

    def _consumed(self) -> None:
        """A decode step has run: its input token is part of the state now."""
        self._previous = len(self.tokens)
        self.tokens.append(self._last)
        self._slot ^= 1

    def _reach_further(self) -> None:
        """The lists end here and nothing is in flight: more room if need be, the next lists, the next burst."""
        self.reserve(len(self.tokens) + 1)
        self._begin(self._limit - self._produced)

    def _check_failure(self) -> None:
        if self._pipeline.failed:
            text = self.device.lib.lily_error(self.device.handle)
            self._pipeline.drain()
            self.reset()
            cause = text.decode("utf-8", "replace") if text else "a step failed"
            raise DeviceError(f"{self.device.name} device: {cause}")

    def stop(self) -> None:
        """Ends the reply. Steps that ran beyond the tokens read are waited for and accounted for."""
        extra = self._pipeline.drain()
        produced = self._produced
        for i in range(extra):
            if produced + i:
                self._consumed()
            self._last = int(self._outputs[(produced + i) % OUTPUT_RING]["token"])

    # ---- scoring
    def score(self, chunk: Sequence[int], targets: Sequence[int], top: int) -> tuple[Any, Any, Any, Any]:
        """Appends ``chunk``: (log-probabilities of ``targets``, best ids [n, top], theirs, flags of bad rows)."""
        rows = self.policy.bucket(len(chunk))
        self.reserve(len(self.tokens) + len(chunk))
        sizes = {"targets": 1, "logprobs": 1, "flags": 1, "ids": max(top, 4), "values": max(top, 4)}
        for name, width in sizes.items():
            self._allocate(f"score.{name}", self.policy.buckets[-1] * width * 4)
        n = len(chunk)
        self._buffers["request"].array(structs.REQUEST)["vocab"] = self.vocab
        self._buffers["score.targets"].array(np.int32)[:n] = targets
        self._run_chunk(chunk, _Key("score", rows, top, self._capacity))
        out = {name: self._buffers[f"score.{name}"] for name in ("logprobs", "ids", "values", "flags")}
        return (
            out["logprobs"].array(np.float32)[:n].copy(),
            out["ids"].array(np.int32)[: n * top].reshape(n, top).copy(),
            out["values"].array(np.float32)[: n * top].reshape(n, top).copy(),
            out["flags"].array(np.int32)[:n].copy(),
        )

    def check_context(self, prompt: int, what: str = "prompt") -> None:
        """ContextLengthError unless ``prompt`` tokens leave room for one more."""
        if prompt >= self.max_context:
            raise ContextLengthError(
                f"the {what} has {prompt} tokens, the context holds {self.max_context} of them with the reply; "
                "shorten it, or allow more with max_context "
                f"(the model's limit is {self.config.max_position_embeddings})"
            )

    def close(self) -> None:
        """Frees lists and buffers; the weights' too. Waits for all that may still run."""
        self._pipeline.drain()
        with suppress(DeviceError):  # of what failed nobody wants to know any more
            self.device.wait(self.device.submit([]))
        self._drop_lists()
        for b in self._buffers.values():
            b.free()
        self._buffers.clear()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    x, y = np.asarray(a[:n], np.int64), np.asarray(b[:n], np.int64)
    different = np.flatnonzero(x != y)
    return int(different[0]) if len(different) else n
