# SPDX-License-Identifier: Apache-2.0
"""What a plan does and how near it is to the least possible traffic, as plain data for ``lily plan``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from lily.checkpoint.config import LINEAR_ATTENTION, ModelConfig
from lily.checkpoint.tensors import expected_tensors
from lily.errors import InvalidRequestError
from lily.plan.builder import Builder, check_rows
from lily.plan.decode import decode_plan
from lily.plan.memory import kv_token_bytes
from lily.plan.prefill import prefill_plan
from lily.plan.sample import sample_plan
from lily.plan.views import Plan
from lily.plan.weights_map import map_weights
from lily.policy import Policy

Phase = Literal["decode", "prefill"]

_STORED_BYTES = {"U32": 4, "BF16": 2}
_EMBEDDING, _HEAD, _ROUTED = "embed_tokens.", ("norm.", "lm_head."), ".switch_mlp."


def plan_report(
    config: ModelConfig, policy: Policy, *, phase: Phase = "decode", rows: int | None = None, context: int = 4096,
    greedy: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The lists that run for one step of ``phase``, summed up.

    decode: one token at a context of ``context`` tokens, itself included: the forward list, then the sample list.
    prefill: a chunk of ``rows`` (default: the policy's) whose last token is number ``context``.  A list is recorded
    for a bucket of rows; it is counted as if all rows of the bucket were real.
    ``bytes`` sums, over the dispatches, the distinct bytes that each reads and writes; ``minimum_bytes`` is
    ``minimum_bytes()`` for the same rows and context.  Raises InvalidRequestError.
    """
    rows = rows or (1 if phase == "decode" else policy.chunks[0][1])
    check_rows(policy, rows)
    if phase == "decode" and rows != 1:
        raise InvalidRequestError(f"{rows} rows in decode; it has one row, more are the phase prefill")
    if not rows <= context <= config.max_position_embeddings:
        raise InvalidRequestError(
            f"a context of {context} tokens; allowed are {rows} (the rows) to {config.max_position_embeddings} "
            "(the model's limit)"
        )
    bucket = 1 if phase == "decode" else policy.bucket(rows)
    weights = map_weights(config, policy)

    def builder() -> Builder:
        kv_tokens = policy.kv_tokens(context)
        return Builder(config, policy, rows=bucket, kv_tokens=kv_tokens, context=context, weights=weights)

    if phase == "decode":
        plans = [decode_plan(builder()), sample_plan(builder(), greedy=greedy, logprobs=False)]
    else:
        plans = [prefill_plan(builder())]
    return {
        "phase": phase,
        "device": policy.device,
        "rows": rows,
        "bucket": bucket,
        "context": context,
        "ablate": sorted(policy.ablate),
        **_sums(plans),
        "minimum_bytes": minimum_bytes(config, phase=phase, rows=bucket, context=context),
        "list": _dispatches(plans),
    }


def _sums(plans: Sequence[Plan]) -> dict[str, int]:
    """Of lists that run one after the other: levels add up, and a barrier lies between two lists."""
    return {
        "dispatches": sum(len(plan.dispatches) for plan in plans),
        "levels": sum(plan.levels for plan in plans),
        "barriers": sum(plan.barriers for plan in plans) + len(plans) - 1,
        "bytes": sum(plan.bytes for plan in plans),
    }


def _dispatches(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    level = 0
    for plan in plans:
        for first, dispatch in enumerate(plan.dispatches):
            entry = {"plan": plan.name, **dispatch.describe()}
            entry["level"] += level
            entry["barrier"] = dispatch.barrier or (first == 0 and bool(out))
            out.append(entry)
        level += plan.levels
    return out


def minimum_bytes(config: ModelConfig, *, phase: Phase = "decode", rows: int = 1, context: int = 4096) -> int:
    """The least bytes that a step can move: no activations, nothing read twice.

    Weights as the checkpoint stores them, each read once: of the embedding one row a token, of the routed experts the
    expected number of distinct ones under uniform routing, E·(1 − (1 − A/E)^rows), which for one row is A; prefill
    leaves out the final norm and the head.  K and V of ``context`` tokens read once.  Recurrent state (float32) and
    convolution state (bfloat16) read and written.
    """
    e, a = config.num_experts, config.experts_per_token
    hit = 1 - (1 - a / e) ** rows  # share of a layer's experts
    total = 0.0
    for name, form in expected_tensors(config).items():
        nbytes = float(_STORED_BYTES[form.dtypes[0]] * prod(form.shape))
        if name.startswith(_EMBEDDING):
            total += nbytes * min(rows / config.vocab_size, 1)
            if config.tie_word_embeddings and phase == "decode":
                total += nbytes
        elif _ROUTED in name:
            total += nbytes * hit
        elif phase == "decode" or not name.startswith(_HEAD):
            total += nbytes
    conv = (config.conv_kernel - 1) * config.conv_dim * 2
    recurrent = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    state = config.layer_types.count(LINEAR_ATTENTION) * (conv + recurrent)
    return round(total) + context * kv_token_bytes(config) + 2 * state
