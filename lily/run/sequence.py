# SPDX-License-Identifier: Apache-2.0
"""What one conversation owns on a device: tokens, two state slots, snapshots, KV cache, inputs and outputs of a step.

Its history (history.py) says which points can be resumed: the two slots, and those of which a copy of the state was
kept; KV rows up to such a point stay valid until ``resume`` drops what lies beyond it.  Any number of sequences may
share weights and scratch memory, one running at a time.
Not handled: running anything (runner.py, reply.py); sharing KV rows between sequences.
"""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np

from lily import structs
from lily.checkpoint.config import ModelConfig
from lily.device.device import Buffer, Bytes, Device, free
from lily.errors import ContextLengthError
from lily.plan.memory import SLOTTED, StateLayout, kv_layers, kv_row_bytes, sequence_buffers
from lily.policy import Policy
from lily.run.history import History


class Sequence(History):
    """Tokens and their memory; ``max_context`` bounds the tokens.

    Raises DeviceError where the device has no memory for it.
    """

    def __init__(self, device: Device, config: ModelConfig, policy: Policy, *, max_context: int) -> None:
        super().__init__(canonical=policy.canonical)
        self.device, self.config, self.policy, self.max_context = device, config, policy, max_context
        self.slot = 0  # the slot that holds the current state
        self.kv_tokens = 0  # tokens that the KV cache holds
        state = StateLayout.of(config, policy).nbytes
        small = sequence_buffers(config, policy, 0)
        sizes = {f"{base}.{slot}": small[f"{base}.in"] for base in ("step", "ids") for slot in "AB"}
        sizes |= {n: size for n, size in small.items() if n.split(".")[0] not in SLOTTED and n != "history"}
        self.buffers = device.buffers({f"state.{slot}": state for slot in "AB"}, shared=False)
        try:
            self.buffers |= device.buffers(sizes)
            self.grow(1)
        except BaseException:
            self.close()
            raise

    # ---- memory
    @property
    def nbytes(self) -> int:
        """Device bytes in use."""
        return sum(b.nbytes for b in list(self.buffers.values()))

    @property
    def held(self) -> int:
        """Bytes in use with the kept states, which lie in the host's memory."""
        kept: int = sum(state.nbytes for state in list(self.points.values()))  # other threads ask, too
        return self.nbytes + kept

    def array(self, name: str, dtype: Any) -> np.ndarray[Any, Any]:
        """The buffer called ``name``; of those of which there are two, the one that the next step reads."""
        base = name.split(".")[0]
        return self.buffers[f"{base}.{'AB'[self.slot]}" if base in SLOTTED else name].array(dtype)

    def bound(self, slot: int) -> dict[str, Buffer]:
        """The buffers under the names of a plan that reads the state in ``slot`` and writes the other one."""
        names = dict(self.buffers)
        for base in SLOTTED:
            names[f"{base}.in"] = self.buffers[f"{base}.{'AB'[slot]}"]
            names[f"{base}.out"] = self.buffers[f"{base}.{'BA'[slot]}"]
        return names

    def grow(self, tokens: int) -> None:
        """Makes the KV cache hold ``tokens``, and some more. No recorded list may name the buffers that it replaces.

        DeviceError where there is no memory for it; the sequence is as before then.
        """
        kv_tokens = max(tokens, min(self.policy.kv_tokens(tokens), self.max_context))
        row, used = kv_row_bytes(self.config), len(self.tokens)
        history = sequence_buffers(self.config, self.policy, kv_tokens)["history"]
        grown = self.device.buffers(dict.fromkeys(self._kv_names, kv_tokens * row), shared=False)
        replaced = {}
        try:
            grown |= self.device.buffers({"history": history})
            replaced = {name: self.buffers[name] for name in grown if name in self.buffers}
            for name, old in replaced.items():
                grown[name].copy(old, old.nbytes if name == "history" else used * row)
        except BaseException:  # Ctrl-C in a long copy
            free(grown)
            raise
        self.buffers |= grown
        self.kv_tokens = kv_tokens
        free(replaced)

    def close(self) -> None:
        """Gives the memory back; nothing that uses it may be in flight, and no recorded list name it."""
        free(self.buffers)
        self.forget()

    # ---- tokens
    def append(self, chunk: abc.Sequence[int]) -> None:
        """``chunk`` has been submitted: its state is in the other slot."""
        super().append(chunk)
        self.slot ^= 1

    def take_back(self, start: int) -> None:
        """Forgets the chunk that began at ``start``; the slot with the state before it is intact."""
        super().take_back(start)
        self.slot ^= 1

    # ---- reuse of earlier work
    def resume(self, prompt: abc.Sequence[int]) -> int:
        """Goes to the latest point that ``prompt`` shares, leaving at least one token to run; returns its position."""
        position, where = self.point(prompt, in_use=False)
        if where == "previous":
            self.slot ^= 1
        elif where == "kept":
            self._state.write(self.points[position])
        elif where == "start":
            self._state.fill()
        self.go_to(position, where)
        return position

    def copy_prefix(self, other: Sequence, prompt: abc.Sequence[int], *, in_use: bool) -> int:
        """Becomes a copy of ``other`` as far as ``prompt`` shares it; returns that position, ``other.match(prompt)``.

        The KV cache holds so many tokens already. ``other`` may be ``in_use``: what is copied is not written any more.
        """
        position, where = other.point(prompt, in_use=in_use)
        self.reset()
        if where == "kept":
            self._state.write(other.points[position])
        else:
            slot = other.slot if where == "current" else other.slot ^ 1
            self._state.copy(other.buffers[f"state.{'AB'[slot]}"], self._state.nbytes)
        for name in self._kv_names:
            self.buffers[name].copy(other.buffers[name], position * kv_row_bytes(self.config))
        self._begin_with(prompt[:position])
        self.snapshot()
        return position

    def adopt(self, tokens: abc.Sequence[int], states: dict[int, Bytes]) -> None:
        """Has consumed ``tokens``, whose KV rows are there, and keeps ``states``; one is that after all of them."""
        self._state.write(states[len(tokens)])
        self._begin_with(tokens)
        self.points = states

    def _begin_with(self, tokens: abc.Sequence[int]) -> None:
        self.buffers["history"].array(np.int32)[: len(tokens)] = tokens
        self.tokens = list(tokens)

    @property
    def _kv_names(self) -> list[str]:
        return [f"kv.{layer}.{which}" for layer in kv_layers(self.config) for which in "kv"]

    @property
    def kv(self) -> dict[str, Buffer]:
        """By name the K and V rows of each layer that has them, a token after the other."""
        return {name: self.buffers[name] for name in self._kv_names}

    @property
    def kv_row_bytes(self) -> int:
        """Of a token, in each of ``kv``."""
        return kv_row_bytes(self.config)

    def positions(self) -> set[int]:
        """Those of ``states`` while nothing of it is in flight."""
        return self.points.keys() | (set() if self._canonical or not self.tokens else {len(self.tokens)})

    def states(self, *, in_use: bool = False) -> dict[int, Bytes]:
        """By position the states to which it can go back; of one ``in_use`` none that a step in flight may write."""
        current = {} if in_use or self._canonical or not self.tokens else {len(self.tokens): self._state.read()}
        return current | self.points

    def reset(self) -> None:
        """Forgets everything: no tokens, zero state, no points. Nothing of it may be in flight."""
        self.forget()
        self._state.fill()

    @property
    def _state(self) -> Buffer:
        """The current slot."""
        return self.buffers[f"state.{'AB'[self.slot]}"]

    @property
    def state_bytes(self) -> int:
        """Of one state."""
        return self._state.nbytes

    def snapshot(self) -> None:
        """Copies the current state, to be resumed later."""
        position = len(self.tokens)
        if position and position not in self.points:
            self.points[position] = self._state.read()

    # ---- the inputs of a step
    def write_chunk(self, chunk: abc.Sequence[int]) -> None:
        """Makes ``chunk`` the input of the next step, and forgets what a reply before it counted."""
        start, n = len(self.tokens), len(chunk)
        self.array("step", structs.STEP)[0] = (start, n, 0, 0)
        self.array("ids", np.int32)[:n] = chunk
        self.array("history", np.int32)[start : start + n] = chunk
        self.buffers["counts"].bytes[:] = 0  # of the reply to come; a failed attempt may have counted its token


def check_context(config: ModelConfig, max_context: int, prompt: int, what: str = "prompt") -> None:
    """ContextLengthError unless ``prompt`` tokens leave room for one more."""
    if prompt >= max_context:
        raise ContextLengthError(
            f"the {what} has {prompt} tokens, the context holds {max_context} of them with the reply; "
            f"shorten it, or allow more with max_context (the model's limit is {config.max_position_embeddings})",
            tokens=prompt, limit=max_context,
        )  # fmt: skip
