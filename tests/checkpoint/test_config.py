# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: every place a value may stand, every value that must be refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from needs import REAL_DATA
from paths import DATA

from lily.checkpoint.config import ModelConfig, QuantSpec, canonical_name, is_skipped
from lily.checkpoint.strict_json import parse_object
from lily.checkpoint.tensors import check_overrides, expected_tensors
from lily.errors import CheckpointError

TINY = json.loads((DATA / "random-tiny" / "config.json").read_text())
ABSENT = object()


def tiny(**text_changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    for key, value in text_changes.items():
        put(config["text_config"], key, value)
    return config


def put(section: dict[str, Any], key: str, value: object) -> None:
    if value is ABSENT:
        section.pop(key, None)
    else:
        section[key] = value


def read(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(config, "folder/config.json")


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """As a text-only conversion writes it: one level, older RoPE keys."""
    config = copy.deepcopy(config)
    result = {**config.pop("text_config"), **config}
    rope = result.pop("rope_parameters")
    result |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    result["model_type"] = "qwen3_5_moe_text"
    return result


def test_published_config_gives_the_documented_sizes() -> None:
    folder = os.environ.get("LILY_TEST_DATA")
    if not folder:
        pytest.skip(REAL_DATA)
    config = ModelConfig.from_file(Path(folder) / "config.json")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2048, 40, 248_320)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (16, 2, 256, 64)
    assert (config.key_dim, config.value_dim, config.conv_dim, config.conv_kernel) == (2048, 4096, 8192, 4)
    assert (config.num_experts, config.experts_per_token) == (256, 8)
    assert (config.moe_intermediate_size, config.shared_intermediate_size) == (512, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-6, 1e7, 262_144)
    assert config.norm_topk_prob
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == (248_046, 248_044)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == list(range(3, 40, 4))
    assert len(config.quantization_overrides) == 80
    assert config.quantization_of("language_model.model.layers.39.mlp.gate") == QuantSpec(8, 64)
    assert config.quantization_of("layers.39.mlp.shared_expert_gate") == QuantSpec(8, 64)
    assert config.quantization_of("layers.39.mlp.switch_mlp.gate_proj") == QuantSpec(4, 64)


def test_flat_text_only_config_means_the_same() -> None:
    assert read(flat(TINY)) == read(TINY)


def test_layers_come_from_either_key() -> None:
    expected = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    assert read(tiny(layer_types=ABSENT)).layer_types == expected
    assert read(tiny(full_attention_interval=ABSENT)).layer_types == expected
    irregular = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    assert read(tiny(full_attention_interval=ABSENT, layer_types=irregular)).layer_types == tuple(irregular)


def test_absent_norm_topk_prob_means_true_and_false_is_kept() -> None:
    assert read(TINY).norm_topk_prob
    assert not read(tiny(norm_topk_prob=False)).norm_topk_prob


def test_tied_embeddings_are_read_from_the_text_section_first() -> None:
    assert read(tiny(tie_word_embeddings=True)).tie_word_embeddings
    config = tiny(tie_word_embeddings=ABSENT)
    config["tie_word_embeddings"] = True
    assert read(config).tie_word_embeddings


def test_quantization_overrides_hold_with_and_without_prefix() -> None:
    config = copy.deepcopy(TINY)
    del config["quantization_config"]
    config["quantization"] = {
        "group_size": 32,
        "bits": 4,
        "model.layers.0.mlp.gate": {"group_size": 128, "bits": 8, "mode": "affine"},
        "lm_head": {"group_size": 64, "bits": 8},
        "language_model.model.embed_tokens": True,
        "vision_tower.blocks.0.attn.qkv": False,
        "mtp.layers.0.mlp.gate": {"bits": 3, "group_size": 16},
    }
    model = read(config)
    assert model.quantization_of("language_model.model.layers.0.mlp.gate") == QuantSpec(8, 128)
    assert model.quantization_of("language_model.lm_head") == QuantSpec(8, 64)
    assert model.quantization_of("embed_tokens") == QuantSpec(4, 32)


def test_every_usual_prefix_of_an_override_names_the_same_module() -> None:
    for prefix in ("", "model.", "language_model.model.", "model.language_model.", "model.language_model.model."):
        config = copy.deepcopy(TINY)
        del config["quantization_config"]
        override = {"group_size": 32, "bits": 8}
        config["quantization"] = {"group_size": 64, "bits": 4, f"{prefix}layers.0.mlp.gate": override}
        model = read(config)
        assert model.quantization_of("layers.0.mlp.gate") == QuantSpec(8, 32)
        check_overrides(model)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("model.layers.0.mlp.gat", "expected one such as layers.0.mlp.gate,"),
        ("transformer.layers.0.mlp.gate", "expected one such as layers.0.mlp.gate,"),
        ("layers.99.mlp.gate", "expected one such as layers."),
        ("layers.0.linear_attn.conv1d", "expected one such as layers.0.linear_attn."),
        ("model.language_model.norm", "expected one such as "),
        ("x" * 10_000 + ".y", "expected one such as "),
    ],
)
def test_an_override_that_names_no_module_is_refused(module: str, words: str) -> None:
    config = copy.deepcopy(TINY)
    del config["quantization_config"]
    config["quantization"][module] = {"group_size": 64, "bits": 8}
    with pytest.raises(CheckpointError, match="names no quantized module") as caught:
        check_overrides(read(config))
    assert str(caught.value).startswith("folder/config.json: quantization[")
    assert words in str(caught.value)
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize("module", ["vision_tower.blocks.0.attn.qkv", "model.visual.merger.mlp.0", "mtp.fc"])
def test_overrides_of_vision_and_mtp_modules_are_ignored(module: str) -> None:
    config = copy.deepcopy(TINY)
    del config["quantization_config"]
    config["quantization"][module] = {"group_size": 16, "bits": 3}
    check_overrides(read(config))


def test_either_quantization_key_is_enough() -> None:
    for key in ("quantization", "quantization_config"):
        config = copy.deepcopy(TINY)
        del config[key]
        assert read(config).quantization_of("layers.1.mlp.gate") == QuantSpec(8, 64)


def test_settings_left_from_the_source_of_a_conversion_are_ignored() -> None:
    config = copy.deepcopy(TINY)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read(config) == read(TINY)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ],
)
def test_every_size_is_checked(key: str) -> None:
    for value in (ABSENT, None, 0, -1, True, "256", 256.0, [256], {}, 1 << 31, 10**400, 10**5000):
        with pytest.raises(CheckpointError, match=rf"^folder/config\.json: {key} (is|are) ") as caught:
            read(tiny(**{key: value}))
        assert len(str(caught.value)) < 250


def test_one_layer_is_enough() -> None:
    assert read(tiny(num_hidden_layers=1, layer_types=ABSENT)).layer_types == ("linear_attention",)
    assert read(tiny(num_hidden_layers=1, layer_types=["full_attention"], full_attention_interval=1)).num_layers == 1


UNSUPPORTED = {
    "hidden_act": ["gelu", 1],
    "attention_bias": [True, 0],
    "attn_output_gate": [False],
    "mlp_only_layers": [[1]],
    "decoder_sparse_step": [2],
    "rms_norm_eps": [ABSENT, 0, -1e-6, "1e-6", 1e400, True],
    "norm_topk_prob": [1, "true"],
    "tie_word_embeddings": [0],
    "num_key_value_heads": [3],
    "linear_num_key_heads": [3],
    "num_experts_per_tok": [9],
    "layer_types": [
        "full_attention",
        ["linear_attention"] * 4,
        ["linear_attention"] * 3 + ["full_attention"] * 2,
        [["linear_attention"]] * 4,
    ],
    "full_attention_interval": [0, True, "4", 3],
    "eos_token_id": ["960", 960.5, [960, True], -1, [1024], 10**30],
    "model_type": ["qwen3_next", 5, None],
    "rope_scaling": ["yarn", {"type": "yarn", "factor": 4.0}, {"rope_type": "linear"}],
    "rope_theta": [1e6, 0, "1e7"],
    "partial_rotary_factor": [0.5, True],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in UNSUPPORTED.items() for value in values])
def test_unsupported_and_contradictory_values_are_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"^folder/config\.json: ") as caught:
        read(tiny(**{key: value}))
    assert key.removesuffix("_scaling") in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": ABSENT},
        {"rope_theta": 0},
        {"rope_theta": "1e7"},
        {"partial_rotary_factor": ABSENT},
        {"partial_rotary_factor": 0.0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.3},
        {"partial_rotary_factor": 1 / 256},
        {"type": "yarn", "factor": 4.0},
        {"rope_type": "llama3"},
    ],
)
def test_bad_rope_parameters_are_named(change: dict[str, Any]) -> None:
    rope = dict(TINY["text_config"]["rope_parameters"])
    for key, value in change.items():
        put(rope, key, value)
    with pytest.raises(CheckpointError, match=r"rope|rotary"):
        read(tiny(rope_parameters=rope))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"bits": 4},
        {"group_size": 64},
        {"bits": 2, "group_size": 64},
        {"bits": 6, "group_size": 64},
        {"bits": True, "group_size": 64},
        {"bits": 4.0, "group_size": 64},
        {"bits": "4", "group_size": 64},
        {"bits": 4, "group_size": 16},
        {"bits": 4, "group_size": None},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 4, "group_size": 64, "lm_head": {"bits": 5, "group_size": 64}},
        {"bits": 4, "group_size": 64, "lm_head": {"bits": 8}},
        {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32, "mode": "nvfp4"}},
        {"bits": 4, "group_size": 64, "model.embed_tokens": False},
        {"bits": 4, "group_size": 64, "model.layers.0.mlp.gate": 8},
        {
            "bits": 4,
            "group_size": 64,
            **{key: {"bits": 8, "group_size": 64} for key in ("lm_head", "language_model.lm_head")},
        },
        [],
        4,
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ],
)
def test_bad_quantization_is_named(section: object) -> None:
    config = copy.deepcopy(TINY)
    del config["quantization_config"]
    config["quantization"] = section
    with pytest.raises(CheckpointError, match=r"quantization"):
        read(config)


def test_unquantized_model_is_refused_with_the_way_to_convert_it() -> None:
    config = copy.deepcopy(TINY)
    del config["quantization"], config["quantization_config"]
    with pytest.raises(CheckpointError, match=r"quantization is missing.*mlx_lm\.convert -q"):
        read(config)


def test_two_different_quantization_sections_are_refused() -> None:
    config = copy.deepcopy(TINY)
    config["quantization_config"] = {"bits": 8, "group_size": 64}
    with pytest.raises(CheckpointError, match="differ"):
        read(config)


@pytest.mark.parametrize("model_type", [ABSENT, "llama", "qwen3_5", "qwen3_moe", ["qwen3_5_moe"]])
def test_other_architectures_are_refused(model_type: object) -> None:
    config = copy.deepcopy(TINY)
    put(config, "model_type", model_type)
    with pytest.raises(CheckpointError, match=r"model_type is .*qwen3_5_moe"):
        read(config)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        b'{"a":' + b"[" * 200_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_damaged_files_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        ModelConfig.from_file(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("depth", "sound"), [(30, True), (33, False), (900, False), (9000, False), (200_000, False)])
def test_nesting_is_bounded(depth: int, sound: bool) -> None:
    data = b'{"a":' + b"[" * depth + b"1" + b"]" * depth + b"}"
    if sound:
        assert "a" in parse_object(data, "x")
    else:
        with pytest.raises(CheckpointError, match="x: JSON is nested too deeply"):
            parse_object(data, "x")


def test_nan_is_refused_even_where_nothing_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for value in ("NaN", "Infinity", "-Infinity"):
        path.write_text(json.dumps(TINY)[:-1] + f', "unused": {value}}}')
        with pytest.raises(CheckpointError, match=f"{value} is not allowed"):
            ModelConfig.from_file(path)


def test_every_value_is_checked_when_constructed_directly_too() -> None:
    model = read(TINY)
    for change in ({"hidden_size": 0}, {"rotary_dim": 63}, {"rope_theta": float("nan")}, {"layer_types": ()}):
        with pytest.raises(CheckpointError):
            dataclasses.replace(model, **change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="bits"):
        dataclasses.replace(model, quantization=QuantSpec(3, 64))


def test_other_sizes_of_the_family_give_hand_calculated_shapes() -> None:
    model = read(
        tiny(
            hidden_size=384,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=32,
            linear_value_head_dim=64,
            num_experts=5,
            moe_intermediate_size=192,
            shared_expert_intermediate_size=320,
            vocab_size=1000,
        )
    )
    assert (model.rotary_dim, model.key_dim, model.value_dim, model.conv_dim) == (16, 64, 384, 512)
    shapes = {name: form.shape for name, form in expected_tensors(model).items()}
    assert shapes["layers.3.self_attn.q_proj.weight"] == (768, 48)
    assert shapes["layers.3.self_attn.k_proj.scales"] == (192, 6)
    assert shapes["layers.3.self_attn.o_proj.weight"] == (384, 48)
    assert shapes["layers.3.self_attn.q_norm.weight"] == (64,)
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (512, 48)
    assert shapes["layers.0.linear_attn.in_proj_z.biases"] == (384, 6)
    assert shapes["layers.0.linear_attn.in_proj_a.weight"] == (6, 48)
    assert shapes["layers.0.linear_attn.out_proj.weight"] == (384, 48)
    assert shapes["layers.0.linear_attn.conv1d.weight"] == (512, 4, 1)
    assert shapes["layers.0.linear_attn.norm.weight"] == (64,)
    assert shapes["layers.0.mlp.gate.weight"] == (5, 96)
    assert shapes["layers.0.mlp.shared_expert.down_proj.weight"] == (384, 40)
    assert shapes["layers.0.mlp.switch_mlp.gate_proj.weight"] == (5, 192, 48)
    assert shapes["layers.0.mlp.switch_mlp.down_proj.scales"] == (5, 384, 3)
    assert shapes["lm_head.scales"] == (1000, 6)


def test_inputs_that_do_not_divide_into_groups_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"shared_expert\.down_proj has 96 inputs, expected a multiple of .* 64"):
        expected_tensors(read(tiny(shared_expert_intermediate_size=96)))


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("vision_tower.blocks.0.attn.qkv.weight", True),
        ("mtp.fc.weight", True),
        ("language_model.mtp.layers.0.mlp.gate.weight", True),
        ("model.mtp.norm.weight", True),
        ("language_model.model.mtp.norm.weight", True),
        ("model.vision_tower.pos_embed.weight", True),
        ("model.language_model.mtp.norm.weight", True),
        ("model.visual.patch_embed.proj.weight", True),
        ("visual_head.weight", False),
        ("mtp_head.weight", False),
        ("language_model.model.layers.0.mtp.weight", False),
        ("language_model.model.norm.weight", False),
    ],
)
def test_vision_and_mtp_are_told_by_name(name: str, skipped: bool) -> None:
    assert is_skipped(name) is skipped


def test_canonical_names_are_idempotent() -> None:
    for name in ("language_model.model.layers.1.mlp.gate", "model.layers.1.mlp.gate", "layers.1.mlp.gate"):
        assert canonical_name(name) == "layers.1.mlp.gate"
    assert canonical_name("model.language_model.layers.1.mlp.gate") == "layers.1.mlp.gate"
    for prefix in ("", "language_model.", "model.language_model."):
        assert canonical_name(f"{prefix}lm_head") == "lm_head"
