# SPDX-License-Identifier: Apache-2.0
"""How long a context fits: weights, state, scratch and snapshots first, the KV cache into what is left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lily.checkpoint.config import ModelConfig
from lily.device.device import Device
from lily.device.host_memory import available_bytes
from lily.device.kinds import kind_of
from lily.errors import DeviceError, InvalidRequestError, show
from lily.plan import every_plan
from lily.plan.memory import MemorySum, StateLayout, kv_token_bytes, memory_sum, sequence_buffers
from lily.plan.weights_map import WeightsMap
from lily.policy import Policy
from lily.units import gb

SNAPSHOTS = 4
"""States of a conversation that are kept beside its slots, in the usual case (points.py)."""

SEQUENCES = 4
"""Where memory allows it: an agent, its subagents, and a chat beside them."""

SOME_LENGTH = 32768
"""Tokens of a conversation, as agents have them."""

LEAST_CONTEXT = 4096
"""Tokens; below this a context is as long as memory allows."""

DISK_BYTES = 10 * 10**9
"""For conversations on disk; of the 35B model eight of 45,000 tokens."""

MAX_SEQUENCES = 64


@dataclass(frozen=True)
class CacheOptions:
    """How many conversations stay, and in how many bytes on the device and on disk. None: what is usual."""

    sequences: int | None
    bytes: int | None
    folder: Path | None
    disk_bytes: int

    @classmethod
    def checked(cls, sequences: object, bytes: object, folder: str | Path | None, disk_bytes: object) -> CacheOptions:
        """InvalidRequestError: a value is not allowed."""
        number = _whole("sequences", sequences, MAX_SEQUENCES)
        at_most = _whole("cache_bytes", bytes, 1 << 62)
        on_disk = _whole("cache_disk_bytes", disk_bytes, 1 << 62) or DISK_BYTES
        return cls(number, at_most, None if folder is None else Path(os.path.expanduser(folder)), on_disk)


def _whole(name: str, given: object, most: int) -> int | None:
    if given is not None and (type(given) is not int or not 1 <= given <= most):
        raise InvalidRequestError(f"{name} is {show(given)}; allowed: a whole number from 1 to {most}")
    return given


@dataclass(frozen=True)
class Budget:
    """What a device may hold: bytes in all and in one buffer, and how a user gets more."""

    total: int
    buffer: int
    remedy: str

    @classmethod
    def of(cls, device: Device) -> Budget:
        """The budget of an open device: what it says itself, or what the machine has left."""
        kind = kind_of(device.name)
        info = device.info if kind.own_memory else {}
        total, buffer = info.get("memory", available_bytes()), info.get("max_buffer", 1 << 62)
        return cls(int(total), int(buffer), kind.more_memory)


def plan_context(
    config: ModelConfig, policy: Policy, weights: WeightsMap, *, budget: Budget, max_context: int | None = None,
    name: str = "the model", pool: int | None = None,
) -> tuple[int, MemorySum]:  # fmt: skip
    """(tokens of the context, memory it needs) within ``budget``; ``max_context`` asks for so many tokens.

    pool: bytes for conversations, if it is not for the budget to say.
    Raises InvalidRequestError beyond the model's limit, and DeviceError with the sum if it cannot fit.
    """
    scratch = largest_scratch(config, policy, weights, max_context or config.max_position_embeddings)

    def needed(tokens: int) -> MemorySum:
        return memory_sum(config, policy, weights, kv_tokens=tokens, scratch=scratch, snapshots=SNAPSHOTS)

    limit = config.max_position_embeddings
    if max_context is not None and not 2 <= max_context <= limit:
        raise InvalidRequestError(f"max_context is {show(max_context)}; allowed are 2 to {limit} for this model")
    fixed = needed(0)
    per_token = needed(1).total - fixed.total  # KV rows and what counts tokens
    largest = max(weights.buffers.values())
    if largest > budget.buffer:
        raise DeviceError(
            f"{name} does not fit: one layer's weights take {gb(largest)}, a buffer of this GPU holds "
            f"{gb(budget.buffer)}; {budget.remedy}"
        )
    fits = (budget.total - fixed.total) // per_token
    if fits < (max_context or 1):
        want = needed(max_context or 1)
        raise DeviceError(
            f"{name} does not fit: it needs {gb(want.total)} (weights {gb(want.weights)}, state {gb(want.state)}, "
            f"KV cache {gb(want.kv)}, scratch {gb(want.scratch)}, snapshots {gb(want.snapshots)}), "
            f"{gb(budget.total)} are available; " + ("use a smaller max_context" if fits >= 1 else budget.remedy)
        )
    pool = _pool_bytes(budget, fixed) if pool is None else pool
    tokens = max_context or min(limit, fits, _comfortable(pool, fixed.state // 2, per_token))
    return tokens, needed(tokens)


def _comfortable(pool: int, state: int, per_token: int) -> int:
    """The largest power of two that leaves room for its states, so that one conversation never takes all there is.

    Where that is next to nothing, there is no bound: the context is what fits.
    """
    room = (pool - (2 + SNAPSHOTS) * state) // per_token
    return 1 << (room.bit_length() - 1) if room >= LEAST_CONTEXT else 1 << 62


def _pool_bytes(budget: Budget, memory: MemorySum) -> int:
    """For sequences: nine tenths of what weights and scratch leave, a quarter of what the device may hold at most."""
    return min((budget.total - memory.weights - memory.scratch) * 9 // 10, budget.total // 4)


def residents_bytes(budget: Budget, memory: MemorySum, one: int, asked: int | None = None) -> int:
    """What all sequences may take together: ``one`` with a full context in any case. asked: by the user.

    InvalidRequestError: so much is not there, or less than ``one`` takes.
    """
    most = budget.total - memory.weights - memory.scratch
    if asked is None:
        return max(one, _pool_bytes(budget, memory))
    if not one <= asked <= most:
        raise InvalidRequestError(
            f"cache_bytes is {show(asked)}; allowed are {one} (a conversation that fills the context) to {most} (what "
            "weights and scratch memory leave); change it, or max_context"
        )
    return asked


def sequences_for(pool: int, one: int) -> int:
    """How many sequences are kept where nobody says it; ``one``: bytes of a conversation of some length."""
    return max(2, min(SEQUENCES, pool // one))


def sequence_bytes(config: ModelConfig, policy: Policy, tokens: int, points: int = SNAPSHOTS) -> int:
    """What a sequence takes that holds ``tokens``, and the states of so many ``points`` beside its slots."""
    state = StateLayout.of(config, policy).nbytes
    small = sum(sequence_buffers(config, policy, tokens).values())
    return (2 + points) * state + kv_token_bytes(config) * tokens + small


def largest_scratch(config: ModelConfig, policy: Policy, weights: WeightsMap, kv_tokens: int) -> int:
    """Scratch bytes of the plan that needs most; fewer rows need less."""
    plans = every_plan(config, policy, kv_tokens=(kv_tokens,), rows=policy.buckets[-1:], weights=weights)
    return max(plan.scratch_bytes for plan in plans)
