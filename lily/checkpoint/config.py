# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's config.json says about the model: sizes, layer kinds, RoPE, quantization.

Reads the qwen3_5_moe family (Qwen3.5 / Qwen3.6 mixture of experts) with MLX affine quantization, as a multimodal
config (``text_config``) or a flat text-only one. Not handled: vision and MTP settings, which are ignored; dense models,
RoPE scaling (YaRN), other quantization modes, which are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lily.checkpoint.strict_json import read_object
from lily.errors import CheckpointError, show

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
QUANT_BITS = (4, 8)
QUANT_GROUP_SIZES = (32, 64, 128)

# Far beyond any member of the family, and small enough that no product of sizes leaves 64 bits.
_LIMITS = {
    "hidden_size": 1 << 16,
    "num_layers": 1 << 10,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 26,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 12,
    "linear_num_key_heads": 1 << 10,
    "linear_num_value_heads": 1 << 10,
    "linear_key_head_dim": 1 << 12,
    "linear_value_head_dim": 1 << 12,
    "conv_kernel": 16,
    "num_experts": 1 << 14,
    "experts_per_token": 1 << 10,
    "moe_intermediate_size": 1 << 16,
    "shared_intermediate_size": 1 << 16,
}

_THETA_RANGE = (1.0, 1e12)

# ModelConfig field -> key in config.json, where they differ.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "conv_kernel": "linear_conv_kernel_dim",
    "experts_per_token": "num_experts_per_tok",
    "shared_intermediate_size": "shared_expert_intermediate_size",
}

_PREFIX = re.compile(r"(model\.)?(language_model\.)?(model\.)?")
_SKIPPED = re.compile(_PREFIX.pattern + r"(vision_tower|visual|mtp)(\.|$)")


def is_skipped(name: str) -> bool:
    """True for tensors and modules that text generation does not use: ``vision_tower.*`` and ``mtp.*``."""
    return _SKIPPED.match(name) is not None


def canonical_name(name: str) -> str:
    """A module's or tensor's name without its prefix; idempotent.

    ``language_model.model.layers.0.mlp.gate``, ``model.language_model.layers.0.mlp.gate`` and
    ``model.layers.0.mlp.gate`` are all ``layers.0.mlp.gate``.
    """
    return _PREFIX.sub("", name, count=1)


@dataclass(frozen=True)
class QuantSpec:
    """Affine quantization of one module: w = scale * q + bias per group of ``group_size`` inputs."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model of the family. Constructing it checks every value; errors begin with ``source``."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dimensions of a head that RoPE turns, in pairs (i, i + rotary_dim / 2)."""
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    layer_types: tuple[str, ...]
    """`full_attention` or `linear_attention` for each layer."""
    quantization: QuantSpec
    """What holds for every module without an override."""
    quantization_overrides: Mapping[str, QuantSpec] = field(default_factory=dict, hash=False)
    """By canonical module name, as in `layers.0.mlp.gate`."""
    tie_word_embeddings: bool = False
    norm_topk_prob: bool = True
    eos_token_ids: tuple[int, ...] = ()
    source: str = field(default="config", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            self._require_int(name, getattr(self, name), 2 if name == "conv_kernel" else 1, limit)
        self._require_number("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)
        self._require_number("rope_theta", self.rope_theta, *_THETA_RANGE)
        self._check_relations()
        self._check_layer_types()
        _check_quant_spec(self.quantization, f"{self.source}: quantization")
        for module, spec in self.quantization_overrides.items():
            _check_quant_spec(spec, f"{self.source}: quantization[{show(module)}]")
        object.__setattr__(self, "quantization_overrides", MappingProxyType(dict(self.quantization_overrides)))

    @property
    def key_dim(self) -> int:
        """Width of all linear-attention keys (and queries) of a token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all linear-attention values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q | k | v."""
        return 2 * self.key_dim + self.value_dim

    def quantization_of(self, module_path: str) -> QuantSpec:
        """Bits and group size of a module, named canonically or as in the checkpoint."""
        return self.quantization_overrides.get(canonical_name(module_path), self.quantization)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a config.json."""
        return cls.from_dict(read_object(Path(path)), str(path))

    @classmethod
    def from_dict(cls, config_json: dict[str, Any], source: str) -> ModelConfig:
        """Checks and converts a parsed config.json; ``source`` (its path) begins every message."""
        return _Reader(config_json, source).model_config()

    def _fail(self, key: str, seen: object, allowed: str) -> CheckpointError:
        return _bad_value(self.source, _KEYS.get(key, key), seen, allowed)

    def _require_int(self, key: str, value: object, low: int, high: int) -> None:
        if type(value) is not int or not low <= value <= high:
            raise self._fail(key, value, f"an integer from {low} to {high}")

    def _require_number(self, key: str, value: object, low: float, high: float) -> None:
        if type(value) not in (int, float) or not low < value <= high:  # type: ignore[operator]
            raise self._fail(key, value, f"a number above {low:g} and up to {high:g}")

    def _check_relations(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise self._fail("num_kv_heads", self.num_kv_heads, f"a divisor of num_attention_heads {self.num_heads}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            allowed = f"a divisor of linear_num_value_heads {self.linear_num_value_heads}"
            raise self._fail("linear_num_key_heads", self.linear_num_key_heads, allowed)
        if self.experts_per_token > self.num_experts:
            raise self._fail("experts_per_token", self.experts_per_token, f"at most num_experts {self.num_experts}")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            allowed = f"head_dim x partial_rotary_factor even, from 2 to head_dim {self.head_dim}"
            raise self._fail("rotary dimension", self.rotary_dim, allowed)
        for token in self.eos_token_ids:
            self._require_int("eos_token_id", token, 0, self.vocab_size - 1)

    def _check_layer_types(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise self._fail("layer_types", f"{len(self.layer_types)} entries", f"num_hidden_layers {self.num_layers}")
        for kind in self.layer_types:
            if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
                raise self._fail("layer_types", kind, f"{FULL_ATTENTION!r} or {LINEAR_ATTENTION!r}")


def _check_quant_spec(spec: QuantSpec, where: str) -> None:
    if type(spec.bits) is not int or spec.bits not in QUANT_BITS:
        raise CheckpointError(f"{where}.bits is {show(spec.bits)}, expected 4 or 8: convert the model with one")
    if type(spec.group_size) is not int or spec.group_size not in QUANT_GROUP_SIZES:
        raise CheckpointError(f"{where}.group_size is {show(spec.group_size)}, expected 32, 64 or 128")


def _bad_value(source: str, key: str, seen: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"{source}: {key} is {show(seen)}, expected {allowed}")


class _Reader:
    """Finds each value where one version or another of config.json keeps it, and checks its type."""

    def __init__(self, root: dict[str, Any], source: str) -> None:
        self.root = root
        self.source = source
        self._check_architecture(root)
        text = root.get("text_config", root)
        if not isinstance(text, dict):
            raise self.fail("text_config", text, "an object")
        self.text = text
        if text is not root and "model_type" in text:
            self._check_architecture(text)

    def model_config(self) -> ModelConfig:
        self._check_fixed_features()
        sizes = {name: self.required(_KEYS.get(name, name)) for name in _LIMITS}
        theta, rotary_factor = self.rope()
        spec, overrides = self.quantization()
        return ModelConfig(
            **sizes,
            rms_norm_eps=self.required("rms_norm_eps"),
            rotary_dim=self.rotary_dim(sizes["head_dim"], rotary_factor),
            rope_theta=theta,
            layer_types=self.layer_types(sizes["num_layers"]),
            quantization=spec,
            quantization_overrides=overrides,
            tie_word_embeddings=self.flag("tie_word_embeddings", default=False),
            norm_topk_prob=self.flag("norm_topk_prob", default=True),
            eos_token_ids=self.eos_token_ids(),
            source=self.source,
        )

    def fail(self, key: str, seen: object, allowed: str) -> CheckpointError:
        return _bad_value(self.source, key, seen, allowed)

    def required(self, key: str) -> Any:
        if self.text.get(key) is None:
            raise CheckpointError(f"{self.source}: {key} is missing")
        return self.text[key]

    def flag(self, key: str, default: bool) -> bool:
        value = self.text.get(key)
        if value is None:
            value = self.root.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(key, value, "true or false")
        return value

    def _check_architecture(self, section: dict[str, Any]) -> None:
        seen = section.get("model_type")
        if seen not in MODEL_TYPES:
            raise self.fail("model_type", seen, "'qwen3_5_moe': Lily runs Qwen3.5 / Qwen3.6 mixture-of-experts models")

    def _check_fixed_features(self) -> None:
        """Refuses what the forward pass does not compute; an absent key has the family's value."""
        for key, only in {
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }.items():
            seen = self.text.get(key)
            if seen is not None and (type(seen) is not type(only) or seen != only):
                raise self.fail(key, seen, f"{show(only)}: Lily does not implement another")

    def rope(self) -> tuple[float, float]:
        """theta and the rotated share of a head; from ``rope_parameters``, or older keys beside it."""
        parameters: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            section = self.text.get(key)
            if section is None:
                continue
            if not isinstance(section, dict):
                raise self.fail(key, section, "an object")
            for kind in ("rope_type", "type"):
                if section.get(kind) not in (None, "default"):
                    raise self.fail(f"{key}.{kind}", section[kind], "'default': RoPE scaling is not implemented")
            parameters = parameters | section
        theta = self._rope_value(parameters, "rope_theta", *_THETA_RANGE)
        return theta, self._rope_value(parameters, "partial_rotary_factor", 0.0, 1.0)

    def _rope_value(self, parameters: dict[str, Any], key: str, low: float, high: float) -> float:
        seen = [section[key] for section in (parameters, self.text) if section.get(key) is not None]
        if not seen:
            raise CheckpointError(f"{self.source}: rope_parameters.{key} is missing")
        for value in seen:
            if type(value) not in (int, float) or not low < value <= high:
                raise self.fail(key, value, f"a number above {low:g} and up to {high:g}")
        if len(set(seen)) > 1:
            raise self.fail(f"rope_parameters.{key}", seen[0], f"{seen[1]} as {key} beside it says")
        return float(seen[0])

    def rotary_dim(self, head_dim: object, factor: float) -> int:
        if type(head_dim) is not int or not 0 < head_dim <= _LIMITS["head_dim"]:
            raise self.fail("head_dim", head_dim, f"an integer from 1 to {_LIMITS['head_dim']}")
        exact = head_dim * factor
        if not math.isclose(exact, round(exact), rel_tol=1e-9):
            raise self.fail("partial_rotary_factor", factor, f"a whole number of head_dim {head_dim}")
        return round(exact)

    def layer_types(self, num_layers: object) -> tuple[str, ...]:
        """From ``layer_types`` or ``full_attention_interval``; both must agree."""
        listed = self.text.get("layer_types")
        interval = self.text.get("full_attention_interval")
        if type(num_layers) is not int or not 0 < num_layers <= _LIMITS["num_layers"]:
            raise self.fail("num_hidden_layers", num_layers, f"an integer from 1 to {_LIMITS['num_layers']}")
        if listed is not None and (not isinstance(listed, list) or not all(type(kind) is str for kind in listed)):
            raise self.fail("layer_types", listed, "a list of strings")
        if interval is None:
            if listed is None:
                raise CheckpointError(f"{self.source}: layer_types and full_attention_interval are both missing")
            return tuple(listed)
        if type(interval) is not int or not 1 <= interval <= _LIMITS["num_layers"]:
            raise self.fail("full_attention_interval", interval, f"an integer from 1 to {_LIMITS['num_layers']}")
        implied = tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))
        if listed is not None and tuple(listed) != implied:
            allowed = f"full_attention at every {interval}th layer as full_attention_interval says"
            raise self.fail("layer_types", listed, allowed)
        return implied

    def eos_token_ids(self) -> tuple[int, ...]:
        """The top level's ids come first; a multimodal config's text section may add to them."""
        ids: list[Any] = []
        for section in (self.root, self.text):
            value = section.get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if type(token) is not int:
                raise self.fail("eos_token_id", token, "an integer or a list of integers")
        return tuple(dict.fromkeys(ids))

    def quantization(self) -> tuple[QuantSpec, dict[str, QuantSpec]]:
        """Default and overrides; ``quantization`` is MLX's own key, ``quantization_config`` its copy."""
        section = self._quantization_section()
        self._check_mode(section, "quantization")
        spec = self._quant_spec(section, "quantization")
        overrides = {}
        for module, value in section.items():
            if value is True or is_skipped(module) or not ("." in module or isinstance(value, dict)):
                continue  # true means "as the default"; names without a dot are settings
            where = f"quantization[{show(module)}]"
            if not isinstance(value, dict):
                raise self.fail(where, value, "bits and group_size: Lily runs quantized modules only")
            self._check_mode(value, where)
            name = canonical_name(module)
            if name in overrides:
                raise CheckpointError(f"{self.source}: {where} is given twice, under two prefixes")
            overrides[name] = self._quant_spec(value, where)
        return spec, overrides

    def _quantization_section(self) -> dict[str, Any]:
        sections: list[dict[str, Any]] = []
        for key in ("quantization", "quantization_config"):
            value = self.root.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.fail(key, value, "an object")
            if "quant_method" in value:
                if sections:
                    continue  # left over from the source that was converted
                raise self.fail(f"{key}.quant_method", value["quant_method"], "MLX affine quantization")
            sections.append(value)
        if not sections:
            raise CheckpointError(
                f"{self.source}: quantization is missing: Lily runs MLX affine checkpoints of 4 or 8 bits; "
                "convert the model with mlx_lm.convert -q"
            )
        if sections[0] != sections[-1]:
            raise CheckpointError(f"{self.source}: quantization and quantization_config differ; expected equal or one")
        return sections[0]

    def _check_mode(self, section: dict[str, Any], where: str) -> None:
        mode = section.get("mode", "affine")
        if mode != "affine":
            raise self.fail(f"{where}.mode", mode, "'affine'")

    def _quant_spec(self, section: dict[str, Any], where: str) -> QuantSpec:
        for key in ("bits", "group_size"):
            if key not in section:
                raise CheckpointError(f"{self.source}: {where}.{key} is missing")
        spec = QuantSpec(section["bits"], section["group_size"])
        _check_quant_spec(spec, f"{self.source}: {where}")
        return spec
