# SPDX-License-Identifier: Apache-2.0
"""The tokens of one reply: decode steps of one sequence, two of them in flight, read one at a time.

A token that may not be any is a step of its own: what it may be follows from the one before it, and the sampler reads
that from a mask.  Forced tokens go the same way, each a decode step: they are few, and no second way has to be right.
The pass of such a step is not submitted ahead of its mask: a mask takes the host microseconds (bench/RESULTS.md).
Not handled: the prompt (runner.py); text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lily import structs
from lily.device.device import Device
from lily.errors import DeviceError
from lily.kernels import OUTPUT_RING, STATUS_NONFINITE
from lily.run._submit import DecodePipeline
from lily.run.recorder import Key, Recorder
from lily.run.sequence import Sequence
from lily.text.guide import Guide


@dataclass(frozen=True)
class Token:
    """A sampled token as the device reported it."""

    id: int
    position: int
    stopped: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Reply:
    """At most ``limit`` tokens, from a prompt whose last chunk samples the first of them.

    Lists are recorded for a range of positions, so a long reply goes in spans: ``_point_pipeline`` begins one.
    guide: says what each token may be.
    """

    def __init__(
        self, recorder: Recorder, sequence: Sequence, sample: Key, limit: int, *, logprobs: bool,
        guide: Guide | None = None,
    ) -> None:  # fmt: skip
        """Writes what the first token may be; nothing of the sequence is in flight."""
        self.sequence, self.limit = sequence, limit
        self._recorder, self._device = recorder, recorder.device
        self._sample, self._logprobs, self._guide = sample, logprobs, guide
        self._outputs = sequence.buffers["outputs"].array(structs.OUTPUT)
        self._pipeline = _pipeline(recorder.device, sequence)
        self._produced = 0  # tokens that were read
        self._span = 0  # tokens that the lists in use can give
        self._last = 0  # the id that was read last
        self._free = self._hold()

    def begin(self, ticket: int) -> None:
        """``ticket`` is the prompt's last chunk with its sampling; nothing else of the sequence is in flight."""
        self._point_pipeline()
        self._pipeline.adopt(ticket)

    def _hold(self) -> int:
        """Writes what the next token may be; of how many tokens it holds that they are steps like any other."""
        if self._guide is None:
            return self.limit
        free = self._guide.free
        self.sequence.array("request", structs.REQUEST)["masked"] = not free
        if not free:
            self._guide.write(self.sequence.array("mask", np.uint32))
        return max(free, 1)

    def _point_pipeline(self) -> None:
        """Points the pipeline at the lists for this position; nothing of the sequence is in flight."""
        key = self._decode = self._recorder.decode_key(self.sequence)
        self._sample = self._sample._replace(kv_tokens=self.sequence.kv_tokens)
        handles = self._handles()
        depth = 1 if self._recorder.policy.ablated("handoff") else 2
        first = 1 if self._produced == 0 else 0  # the first token of a request needs no row of the KV cache
        self._span = min(self.limit - self._produced, key.kv_tokens - len(self.sequence.tokens) + first, self._free)
        self._pipeline.begin(handles[0], handles[1], self.sequence.slot, depth, self._produced, self._span)

    def _handles(self) -> list[list[int]]:
        """Of the lists for a step and its sampling, that read state slot A and that read B."""
        decode, sample = self._recorder.lists(self.sequence, self._decode, self._sample)
        self._generation = self._recorder.generation
        return [[item.handle for item in (decode[slot], sample[slot])] for slot in (0, 1)]

    def next(self) -> Token | None:
        """The next token; None after ``limit`` of them. DeviceError: a failure, non-finite logits."""
        if self._produced >= self.limit:
            return None
        if self._pipeline.finished >= self._span:
            self._extend()
        elif self._generation != self._recorder.generation:  # another sequence had lists freed, these too perhaps
            self._pipeline.relist(*self._handles())
        result = self._pipeline.next()
        if result is None:
            self._check_failure()
            return None
        id, position, status, logprob = result
        if self._produced:
            self._consumed()
        if status == STATUS_NONFINITE:
            self.stop()
            self.sequence.reset()
            raise DeviceError(
                f"the logits at position {position} are not finite: the weights are damaged, or a kernel is wrong; "
                "check the checkpoint's files against their published hashes"
            )
        self._produced += 1
        self._last = id
        if self._guide is not None:
            self._guide.take(id)
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
        self.sequence.append((self._last,))

    def _extend(self) -> None:
        """The span ends here and nothing is in flight: room for more if need be, and the next span."""
        self._recorder.reserve_kv(self.sequence, len(self.sequence.tokens) + 1)
        self._free = self._hold()
        self._point_pipeline()

    def _check_failure(self) -> None:
        if self._pipeline.failed:
            text = self._device.lib.lily_error(self._device.handle)
            self._pipeline.drain()
            self.sequence.reset()
            cause = text.decode("utf-8", "replace") if text else "a step failed"
            raise DeviceError(f"{self._device.name} device: {cause}")

    def stop(self) -> None:
        """Ends the reply. Steps that ran beyond the tokens read are waited for and accounted for."""
        extra = self._pipeline.drain()
        produced = self._produced
        for i in range(extra):
            if produced + i:
                self._consumed()
            self._last = int(self._outputs[(produced + i) % OUTPUT_RING]["token"])
        if self._pipeline.failed:  # of the steps that nobody read one left garbage behind
            self.sequence.reset()


def _pipeline(device: Device, sequence: Sequence) -> DecodePipeline:
    return DecodePipeline(
        device.handle, device.function("lily_submit"), device.function("lily_wait"),
        sequence.buffers["outputs"].address, structs.OUTPUT.itemsize, OUTPUT_RING,
    )  # fmt: skip
