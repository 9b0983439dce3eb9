# SPDX-License-Identifier: Apache-2.0
"""Sizes and places of everything that is not a weight: state slots, KV cache, step inputs, sampler memory.

Recurrent and convolution state live in two slots, A and B: a step reads one and writes the other, so that the slot
before the last step is intact (architecture.md, Slots).  Plans name the slots ``state.in`` and ``state.out`` (likewise
``step`` and ``ids``); binding decides which is A.
"""

from __future__ import annotations

from dataclasses import dataclass

from lily import structs
from lily.checkpoint.config import FULL_ATTENTION, ModelConfig
from lily.kernels import MAX_BIAS, MAX_TOP_LOGPROBS, OUTPUT_RING
from lily.plan.views import View
from lily.plan.weights_map import BYTES, WeightsMap, align
from lily.policy import Policy

SLOTTED = ("state", "step", "ids")  # buffers of which there are an A and a B
# What all sequences have in common: nothing outlives a step in it, or a chunk in the residual stream.
COMMON = ("hidden", "logits", "sampler", "residual")


@dataclass(frozen=True)
class StateLayout:
    """Places of a GDN layer's convolution rows and recurrent state inside a state slot."""

    conv: dict[int, tuple[int, int]]  # layer -> (offset, bytes)
    recurrent: dict[int, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, config: ModelConfig, policy: Policy) -> StateLayout:
        conv_bytes = (config.conv_kernel - 1) * config.conv_dim * BYTES[policy.act]
        s_bytes = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
        conv, recurrent, at = {}, {}, 0
        for i, kind in enumerate(config.layer_types):
            if kind != FULL_ATTENTION:
                conv[i] = (at, conv_bytes)
                at = align(at + conv_bytes)
                recurrent[i] = (at, s_bytes)
                at = align(at + s_bytes)
        return cls(conv, recurrent, at)

    def conv_view(self, layer: int, slot: str) -> View:
        """Convolution rows of ``layer`` in ``slot``: in or out."""
        return View(f"state.{slot}", *self.conv[layer])

    def recurrent_view(self, layer: int, slot: str) -> View:
        """Recurrent state of ``layer`` in ``slot``: in or out."""
        return View(f"state.{slot}", *self.recurrent[layer])


def kv_layers(config: ModelConfig) -> list[int]:
    """Layers with a KV cache."""
    return [i for i, kind in enumerate(config.layer_types) if kind == FULL_ATTENTION]


def kv_row_bytes(config: ModelConfig) -> int:
    """Bytes that one token adds to the K cache, or to the V cache, of one layer (bf16)."""
    return config.num_kv_heads * config.head_dim * 2


def kv_token_bytes(config: ModelConfig) -> int:
    """Bytes that one token adds over all layers, K and V."""
    return 2 * kv_row_bytes(config) * len(kv_layers(config))


def step_buffers(config: ModelConfig, policy: Policy, kv_tokens: int) -> dict[str, int]:
    """Bytes of the small buffers of a step; ``kv_tokens`` is what the KV cache holds."""
    groups = -(-config.vocab_size // policy.sample_slice)
    return {
        "step.in": structs.STEP.itemsize,
        "step.out": structs.STEP.itemsize,
        "ids.in": policy.buckets[-1] * 4,
        "ids.out": policy.buckets[-1] * 4,
        "request": structs.REQUEST.itemsize,
        "outputs": structs.OUTPUT.itemsize * OUTPUT_RING,
        "bias.ids": MAX_BIAS * 4,
        "bias.values": MAX_BIAS * 4,
        "mask": -(-config.vocab_size // 32) * 4,
        "history": (kv_tokens + OUTPUT_RING) * 4,
        "counts": config.vocab_size * 4,
        "hidden": config.hidden_size * BYTES[policy.act],
        "logits": config.vocab_size * 4,
        "residual": _residual_bytes(config, policy),
        "sampler": align(config.vocab_size * 4) + align(groups * 16) + align(groups * 8) + align(groups * 4)
        + align(8) + 2 * align(MAX_TOP_LOGPROBS * 4),
    }  # fmt: skip


def _residual_bytes(config: ModelConfig, policy: Policy) -> int:
    """Of the largest chunk that goes in parts; 0 if none does."""
    rows = policy.buckets[-1]
    return rows * config.hidden_size * BYTES[policy.act] if policy.parts(rows) > 1 else 0


def sequence_buffers(config: ModelConfig, policy: Policy, kv_tokens: int) -> dict[str, int]:
    """Those of ``step_buffers`` that belong to one sequence."""
    return {name: size for name, size in step_buffers(config, policy, kv_tokens).items() if name not in COMMON}


def common_buffers(config: ModelConfig, policy: Policy) -> dict[str, int]:
    """Those of ``step_buffers`` that sequences have in common."""
    sizes = step_buffers(config, policy, 0)
    return {name: sizes[name] for name in COMMON}


@dataclass(frozen=True)
class MemorySum:
    """What an engine needs on its device, in bytes; ``lily info`` prints it."""

    weights: int
    state: int  # both slots
    kv_per_token: int
    kv: int
    scratch: int
    snapshots: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.kv + self.scratch + self.snapshots


def memory_sum(
    config: ModelConfig, policy: Policy, weights: WeightsMap, *, kv_tokens: int, scratch: int, snapshots: int = 0
) -> MemorySum:
    """The sum for a KV cache of ``kv_tokens`` tokens; ``scratch`` is the largest of the plans'."""
    state = StateLayout.of(config, policy).nbytes
    per_token = kv_token_bytes(config)
    small = sum(step_buffers(config, policy, kv_tokens).values())
    return MemorySum(weights.nbytes, 2 * state, per_token, per_token * kv_tokens, scratch + small, snapshots * state)
