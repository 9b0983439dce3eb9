# SPDX-License-Identifier: Apache-2.0
"""Which text tensors a checkpoint must hold, with their shapes, derived from its config alone.

Names are canonical: without ``language_model.`` and ``model.``. Vision and MTP tensors are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from lily.checkpoint.config import FULL_ATTENTION, ModelConfig
from lily.errors import CheckpointError, show

FLOAT_DTYPES = ("BF16", "F32", "F16")


@dataclass(frozen=True)
class ExpectedTensor:
    """Legal form of one tensor; ``raw_shape`` is the unconverted Hugging Face layout where that differs."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    raw_shape: tuple[int, ...] | None = None


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Canonical name -> legal form, for every tensor that text generation reads.

    Raises CheckpointError where a module's inputs do not divide into its quantization groups.
    """
    result = {"norm.weight": ExpectedTensor((config.hidden_size,))}
    for name, shape in quantized_modules(config).items():
        spec = config.quantization_of(name)
        *outputs, inputs = shape
        if inputs % spec.group_size:
            seen = f"{name} has {inputs} inputs"
            raise CheckpointError(f"{config.source}: {seen}, expected a multiple of its group_size {spec.group_size}")
        result[f"{name}.weight"] = ExpectedTensor((*outputs, inputs * spec.bits // 32), ("U32",))
        for part in ("scales", "biases"):
            result[f"{name}.{part}"] = ExpectedTensor((*outputs, inputs // spec.group_size))
    for layer, kind in enumerate(config.layer_types):
        parts = _attention_vectors(config) if kind == FULL_ATTENTION else _linear_attention_vectors(config)
        result |= {f"layers.{layer}.{name}": expected for name, expected in parts.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"layers.{layer}.{norm}.weight"] = ExpectedTensor((config.hidden_size,))
    return result


def quantized_modules(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape [out, in], or [experts, out, in] for the routed experts."""
    embedding = (config.vocab_size, config.hidden_size)
    result: dict[str, tuple[int, ...]] = {"embed_tokens": embedding}
    if not config.tie_word_embeddings:
        result["lm_head"] = embedding
    for layer, kind in enumerate(config.layer_types):
        mixer = _attention_modules(config) if kind == FULL_ATTENTION else _linear_attention_modules(config)
        for name, shape in (*mixer, *_moe_modules(config)):
            result[f"layers.{layer}.{name}"] = shape
    return result


def check_overrides(config: ModelConfig) -> None:
    """Raises CheckpointError where config.json quantizes a module that the model does not have.

    A wrong name would otherwise leave the right module at the default, and be seen in its tensors only.
    """
    modules = quantized_modules(config)
    unknown = [name for name in config.quantization_overrides if name not in modules]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        near = get_close_matches(unknown[0][:200], modules, 1) or list(modules)[-1:]
        raise CheckpointError(
            f"{config.source}: quantization[{show(unknown[0])}]{more} names no quantized module of this model; "
            f"expected one such as {near[0]}, with or without the prefix language_model.model."
        )


Modules = Iterator[tuple[str, tuple[int, ...]]]


def _attention_modules(config: ModelConfig) -> Modules:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    yield "self_attn.q_proj", (2 * queries, hidden)  # each head: query, then output gate
    yield "self_attn.k_proj", (config.num_kv_heads * config.head_dim, hidden)
    yield "self_attn.v_proj", (config.num_kv_heads * config.head_dim, hidden)
    yield "self_attn.o_proj", (hidden, queries)


def _linear_attention_modules(config: ModelConfig) -> Modules:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    yield "linear_attn.in_proj_qkv", (config.conv_dim, hidden)
    yield "linear_attn.in_proj_z", (config.value_dim, hidden)
    yield "linear_attn.in_proj_b", (heads, hidden)
    yield "linear_attn.in_proj_a", (heads, hidden)
    yield "linear_attn.out_proj", (hidden, config.value_dim)


def _moe_modules(config: ModelConfig) -> Modules:
    hidden, experts = config.hidden_size, config.num_experts
    yield "mlp.gate", (experts, hidden)
    yield "mlp.shared_expert_gate", (1, hidden)
    for name, lead, width in (
        ("shared_expert", (), config.shared_intermediate_size),
        ("switch_mlp", (experts,), config.moe_intermediate_size),
    ):
        yield f"mlp.{name}.gate_proj", (*lead, width, hidden)
        yield f"mlp.{name}.up_proj", (*lead, width, hidden)
        yield f"mlp.{name}.down_proj", (*lead, hidden, width)


def _attention_vectors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    return {f"self_attn.{name}.weight": ExpectedTensor((config.head_dim,)) for name in ("q_norm", "k_norm")}


def _linear_attention_vectors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    channels, taps, heads = config.conv_dim, config.conv_kernel, config.linear_num_value_heads
    return {
        "linear_attn.conv1d.weight": ExpectedTensor((channels, taps, 1), raw_shape=(channels, 1, taps)),
        "linear_attn.A_log": ExpectedTensor((heads,)),
        "linear_attn.dt_bias": ExpectedTensor((heads,)),
        "linear_attn.norm.weight": ExpectedTensor((config.linear_value_head_dim,)),
    }
