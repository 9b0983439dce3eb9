# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for the tests of the engine: configs of chosen shapes, and random-tiny with chosen damage.

Not handled: the form of the files (checkpoints.py).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Draft, Tensor, bf16, write_synthetic
from engine_device import current
from paths import DATA

Array = Any
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

# Sizes of a model with few weights, for model_config.
SMALL = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "vocab_size": 1024,
}  # fmt: skip


def tiny_draft(name: str = "random-tiny") -> Draft:
    """random-tiny in memory, with its tokenizer, to edit and write."""
    folder = DATA / name
    draft = Draft.load(folder)
    draft.files.update({file: (folder / file).read_bytes() for file in TOKENIZER_FILES})
    return draft


def tiny_model() -> Path:
    """random-tiny; where kernels are emulated only two of its layers, a GDN and an attention layer."""
    return _two_layers() if current().emulated else DATA / "random-tiny"


@cache
def _two_layers() -> Path:
    draft = tiny_draft()
    draft.edit(lambda tensor: [] if re.search(r"\blayers\.[12]\.", tensor.name) else [tensor])
    draft.rename(lambda name: name.replace("layers.3.", "layers.1."))
    for quantization in (draft.config["quantization"], draft.config["quantization_config"]):
        for name in [n for n in quantization if re.search(r"layers\.[23]\.", n)]:
            del quantization[name]
    draft.text_config.update(
        num_hidden_layers=2, full_attention_interval=2, layer_types=["linear_attention", "full_attention"]
    )
    _folders.append(tempfile.TemporaryDirectory())
    return draft.write(Path(_folders[-1].name) / "two-layers")


def all_experts(folder: Path) -> Path:
    """``tiny_model``, every expert of which is active: no rounding can change a choice among them."""
    draft = Draft.load(tiny_model())
    draft.text_config["num_experts_per_tok"] = draft.text_config["num_experts"]
    return draft.write(folder)


def edit_floats(draft: Draft, name: str, change: Callable[[Array], None]) -> Draft:
    """Lets ``change`` edit, in place, the BF16 tensor whose name ends with ``name``, as float32."""
    hits: list[str] = []

    def edited(tensor: Tensor) -> list[Tensor]:
        if not tensor.name.endswith(name):
            return [tensor]
        assert tensor.dtype == "BF16"
        assert tensor.data is not None
        hits.append(tensor.name)
        bits = np.frombuffer(tensor.data, "<u2").reshape(tensor.shape)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        change(values)
        return [replace(tensor, data=bf16(values).tobytes())]

    draft.edit(edited)
    assert len(hits) == 1, f"{name}: {hits}"
    return draft


_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends


def model_config(**sizes: Any) -> dict[str, Any]:
    """A config.json of real head sizes: GDN layers with every ``full_attention_interval``th one full attention.

    ``overrides`` maps module names, as in "layers.0.mlp.gate", to {"bits": …, "group_size": …}.
    """
    overrides = sizes.pop("overrides", {})
    bits, group = sizes.pop("bits", 4), sizes.pop("group_size", 64)
    rotary = sizes.pop("partial_rotary_factor", 0.25)
    text: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 4, "full_attention_interval": 4,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "vocab_size": 1024, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, **sizes,
        "rope_parameters": {"rope_theta": 10000000.0, "partial_rotary_factor": rotary, "type": "default"},
    }  # fmt: skip
    layers, interval = text["num_hidden_layers"], text["full_attention_interval"]
    text["layer_types"] = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    eight_bit = {f"layers.{i}.mlp.{m}": {} for i in range(layers) for m in ("gate", "shared_expert_gate")}
    modules = {**{m: {"bits": 8, "group_size": group} for m in eight_bit}, **overrides}
    prefixed = {
        f"language_model.{'' if m == 'lm_head' else 'model.'}{m}": {"bits": bits, "group_size": group, **spec}
        for m, spec in modules.items()
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "eos_token_id": [962, 960], "quantization": {"bits": bits, "group_size": group, "mode": "affine", **prefixed},
        "text_config": text,
    }  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], tokenizer: Path = DATA / "random-tiny", seed: int = 0) -> Path:
    """A synthetic checkpoint with the tokenizer of another one."""
    write_synthetic(folder, config, seed)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
    return folder


def with_generation_config(folder: Path, **values: Any) -> Path:
    """Replaces the checkpoint's generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder
