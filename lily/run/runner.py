# SPDX-License-Identifier: Apache-2.0
"""Runs prompts of sequences, chunk by chunk, and starts their replies.  No text, no policy of requests.

Any number of sequences may take turns; each gives the bits that it would give alone.  A large chunk goes in parts of
whole layers (``Policy.part_rows``): what runs it is a generator that stops after each part.  Until it goes on steps of
other sequences may run, and chunks that go in one part, but no other one in parts: there is one residual stream.
Not handled: several sequences at once.
"""

from __future__ import annotations

from collections import abc
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from lily import structs
from lily.checkpoint.config import ModelConfig
from lily.device.device import Device
from lily.device.weights import Weights
from lily.errors import DeviceError
from lily.policy import Policy
from lily.run.recorder import Key, Recorder
from lily.run.reply import Reply
from lily.run.sequence import Sequence
from lily.sampling import SamplingParams, fill_request
from lily.text.guide import Guide

ATTEMPTS = 3  # at a chunk of the prompt

WITHIN = -1
"""What a generator yields that stops between two parts of a chunk."""

T = TypeVar("T")
Parts = abc.Generator[int, None, T]
"""Runs a chunk; stops between its parts, of which nothing is in flight then. Closing it takes the chunk back."""


def whole(parts: Parts[T]) -> T:
    """Runs a chunk to its end, with nothing in between."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


class Runner:
    """Runs sequences on ``device``, whose ``weights`` belong to the caller. ``vocab``: ids that may be drawn."""

    def __init__(self, device: Device, config: ModelConfig, policy: Policy, weights: Weights, *, vocab: int) -> None:
        self.device, self.config, self.policy, self.vocab = device, config, policy, vocab
        self.recorder = Recorder(device, config, policy, weights)
        self._calibrated = not policy.calibration_rows
        self._sequences: list[Sequence] = []

    def sequence(self, *, max_context: int) -> Sequence:
        """A new sequence of at most ``max_context`` tokens."""
        made = Sequence(self.device, self.config, self.policy, max_context=max_context)
        self._sequences.append(made)
        return made

    def release(self, sequence: Sequence) -> None:
        """Ends ``sequence`` and gives its memory back; nothing of it may be in flight."""
        self.recorder.forget(sequence)
        self._sequences.remove(sequence)
        sequence.close()

    @property
    def nbytes(self) -> int:
        """Device bytes in use, without the weights."""
        return self.recorder.nbytes + sum(sequence.nbytes for sequence in self._sequences)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Grows the KV cache to hold ``tokens``. DeviceError where there is no memory for it; all is as before then."""
        self.recorder.reserve_kv(sequence, tokens)

    # ---- chunks
    def prefill(self, sequence: Sequence, chunk: abc.Sequence[int]) -> Parts[None]:
        """Appends ``chunk`` (at most the largest bucket) and waits."""
        self.reserve(sequence, len(sequence.tokens) + len(chunk))
        yield from self._run(sequence, chunk, self.recorder.prefill_keys(sequence, len(chunk)))

    def start(
        self, sequence: Sequence, chunk: abc.Sequence[int], params: SamplingParams, stop_ids: abc.Sequence[int],
        limit: int, guide: Guide | None = None,
    ) -> Parts[Reply]:  # fmt: skip
        """Runs the prompt's last ``chunk`` with its sampling; at most ``limit`` tokens will come, held to ``guide``.

        The chunk is waited for: the step after the next one overwrites the slot from which it could be repeated.
        """
        prompt = len(sequence.tokens) + len(chunk)
        self.reserve(sequence, min(prompt + limit, self.policy.kv_tokens(prompt + 1)))
        fill_request(
            sequence.array("request", structs.REQUEST)[0], sequence.array("bias.ids", np.int32),
            sequence.array("bias.values", np.float32), params, vocab=self.vocab, stop_ids=stop_ids,
        )  # fmt: skip
        sample = self.recorder.sample_key(sequence, params, masked=guide is not None)
        reply = Reply(self.recorder, sequence, sample, limit, logprobs=params.logprobs is not None, guide=guide)
        ticket = yield from self._run(sequence, chunk, self.recorder.prefill_keys(sequence, len(chunk)), [sample])
        reply.begin(ticket)
        return reply

    def score(
        self, sequence: Sequence, chunk: abc.Sequence[int], targets: abc.Sequence[int], top: int
    ) -> Parts[tuple[Any, Any, Any, Any]]:
        """Appends ``chunk``: (log-probabilities of ``targets``, best ids [n, top], theirs, flags of bad rows)."""
        n = len(chunk)
        self.reserve(sequence, len(sequence.tokens) + n)
        sizes = {"targets": 1, "logprobs": 1, "flags": 1, "ids": max(top, 4), "values": max(top, 4)}
        for name, width in sizes.items():
            self.recorder.reserve(f"score.{name}", self.policy.buckets[-1] * width * 4)
        sequence.array("request", structs.REQUEST)["vocab"] = self.vocab

        def result(name: str, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
            return self.recorder.buffers[f"score.{name}"].array(dtype)

        def write_targets() -> None:
            result("targets", np.int32)[:n] = targets

        yield from self._run(sequence, chunk, self.recorder.score_keys(sequence, n, top), before_last=write_targets)
        return (
            result("logprobs")[:n].copy(),
            result("ids", np.int32)[: n * top].reshape(n, top).copy(),
            result("values")[: n * top].reshape(n, top).copy(),
            result("flags", np.int32)[:n].copy(),
        )

    def _run(
        self, sequence: Sequence, chunk: abc.Sequence[int], parts: abc.Sequence[Key], after: abc.Sequence[Key] = (),
        before_last: abc.Callable[[], None] = lambda: None,
    ) -> Parts[int]:  # fmt: skip
        """Appends ``chunk`` with the plans of its ``parts``, those ``after`` with the last of them; returns its ticket.

        When that fails the sequence is as before. ``before_last`` writes what only the last part reads, in buffers that
        sequences share.

        Before the first large chunk a part of it runs, from which the device learns how long its work may be at a
        time. What it gives is dropped: chunk edges must follow from the tokens alone (architecture.md, Reuse).
        """
        rows = self.policy.calibration_rows
        if not self._calibrated and len(chunk) > rows:
            self._calibrated = True
            start = len(sequence.tokens)
            yield from self._attempt(sequence, chunk[:rows], self.recorder.prefill_keys(sequence, rows))
            sequence.take_back(start)
        return (yield from self._attempt(sequence, chunk, parts, after, before_last))

    def _attempt(
        self, sequence: Sequence, chunk: abc.Sequence[int], parts: abc.Sequence[Key], after: abc.Sequence[Key] = (),
        before_last: abc.Callable[[], None] = lambda: None,
    ) -> Parts[int]:  # fmt: skip
        """Runs ``chunk`` and waits. One that the device gave up runs again, from its first part on.

        macOS stops GPU work that keeps the screen waiting; the device then cuts it into smaller pieces, and the state
        slot that it reads from is intact. The residual stream is not: each layer adds to it.
        """
        start = len(sequence.tokens)
        self.recorder.lists(sequence, *parts, *after)  # what cannot be had is said before anything runs
        for attempt in range(ATTEMPTS):
            try:
                return (yield from self._submit(sequence, chunk, parts, after, before_last))
            except DeviceError as error:
                sequence.take_back(start)
                if not error.again or attempt == ATTEMPTS - 1:
                    raise
            except GeneratorExit:  # between two parts: nobody wants the chunk any more
                sequence.take_back(start)
                raise
        raise AssertionError("unreachable")

    def _submit(
        self, sequence: Sequence, chunk: abc.Sequence[int], parts: abc.Sequence[Key], after: abc.Sequence[Key],
        before_last: abc.Callable[[], None],
    ) -> Parts[int]:  # fmt: skip
        """Submits the parts one by one. Their lists are asked for again each time: others may have had them freed."""
        sequence.write_chunk(chunk)
        slot = sequence.slot
        sequence.append(chunk)
        for part in parts[:-1]:
            self._run_part(sequence, slot, part)
            yield WITHIN
        before_last()
        return self._run_part(sequence, slot, parts[-1], *after)

    def _run_part(self, sequence: Sequence, slot: int, *keys: Key) -> int:
        """Submits lists that read the state in ``slot``, and waits for them; returns their ticket."""
        ticket = self.device.submit([pair[slot] for pair in self.recorder.lists(sequence, *keys)])
        self.device.wait(ticket)
        return ticket

    # ---- the end
    def abandon(self, sequence: Sequence) -> None:
        """After something broke in at an unknown place: waits for all that may still run, then starts from nothing."""
        self.device.wait(self.device.submit([]))
        self.recorder.forget()
        sequence.reset()

    def close(self) -> None:
        """Frees everything but the weights. Waits for all that may still run."""
        with suppress(DeviceError):  # close must not raise
            self.device.wait(self.device.submit([]))
        self.recorder.close()
        for sequence in self._sequences:
            sequence.close()
