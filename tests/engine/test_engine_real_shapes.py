# SPDX-License-Identifier: Apache-2.0
"""Models of other shapes than the tiny ones: real sizes, production width, mixed quantization, other heads.

The reference is plain numpy (reference.py) on the same checkpoint. Large ones are written once per run, to a temporary
folder.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, bf16, widen
from engine_device import Target, isa_paths, on_paths, sweep
from engine_harness import current_logits, current_state, forced_logits, open_engine
from models import SMALL, model_config, tiny_draft, write_model
from paths import DATA
from reference import DeviceReference

from lily.checkpoint.config import ModelConfig
from lily.errors import CheckpointError
from lily.plan import Builder, decode_plan, prefill_plan, sample_plan
from lily.plan.views import Plan
from lily.policy import policy_for

ROWS, STEPS = 33, 7


# Relative to the logits' rms. Float32 paths differ from the reference in the order of sums, and where that lets an
# element of K or V fall to the other side of a bfloat16 rounding: between references in float32 and float64 that makes
# 3.5e-4.
FLOAT32_MAX, FLOAT32_RMS = 1e-3, 2e-4
# Rounded values keep 8 bits of mantissa, a dozen times in sequence: where the choice of experts stays the same, up to
# 0.02 seen when what enters a product is rounded, and 0.062 when it is all that crosses a kernel boundary.
ROUNDED_PRODUCTS_RMS, ROUNDED_ACTIVATIONS_RMS = 0.04, 0.09


def check_logits(folder: Path, device: Target) -> None:
    """Prefill of 33 rows, then decode, against the reference; and decode of all rows against both."""
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, 950, ROWS + STEPS)]
    reference = DeviceReference(folder)
    want = reference.forward(tokens, reference.new_cache())[ROWS - 1 :]
    scale = np.sqrt((want**2).mean())
    with open_engine(folder, ablate=["handoff"]) as engine:
        prefilled = forced_logits(engine, tokens, ROWS)
        stepped = forced_logits(engine, tokens, 1)[ROWS - 1 :]
    for got in (prefilled, stepped):
        error = (got - want) / scale
        rms = np.sqrt((error**2).mean())
        if device.rounds:
            assert rms < (ROUNDED_PRODUCTS_RMS if device.name == "cpu" else ROUNDED_ACTIVATIONS_RMS)
        else:
            assert np.abs(error).max() < FLOAT32_MAX
            assert rms < FLOAT32_RMS
            assert (got.argmax(1) == want.argmax(1)).all()
    if device.exact:
        assert stepped.tobytes() == prefilled.tobytes()


def fastest_paths() -> list[str]:
    """The best path, and the best one that does not round activations."""
    paths = isa_paths()
    return list(dict.fromkeys([paths[0], next(p for p in paths if not Target("cpu", p).rounds)]))


# ---- real sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep  # test_emulated_models.py has real sizes there
@on_paths(*fastest_paths())
def test_one_gdn_and_one_attention_layer_of_real_sizes(device, tmp_path):
    """Hidden 2,048, real heads, 8 of 16 experts of width 512, a head of 8,192 rows; all are active where it rounds."""
    experts = 8 if device.rounds else 16
    config = model_config(num_hidden_layers=2, full_attention_interval=2, vocab_size=8192, num_experts=experts)
    check_logits(write_model(tmp_path / "m", config), device)


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Production width, 4 layers, few experts, a small vocabulary."""
    return write_model(tmp_path_factory.mktemp("production") / "m", model_config(num_experts=8, num_experts_per_tok=8))


@pytest.mark.sweep
def test_production_width_runs_end_to_end(device, production):
    with open_engine(production) as engine:
        text = "".join(c.text for c in engine.stream("Once upon a time", max_tokens=20, seed=1))
        chat = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=20, temperature=0, logprobs=2)
        score = engine.score(list(range(1, 100)))
    assert text
    assert chat.logprobs is not None
    assert len(chat.token_ids) == len(chat.logprobs)
    assert np.isfinite(score.logprobs).all()


@cache
def _routes(source: str, device: str) -> frozenset[tuple[Any, ...]]:
    """Kernels with constants and tiles of the plans that a config.json has on a device, at any number of rows.

    Without sizes that follow the model.
    """
    config, policy = ModelConfig.from_dict(json.loads(source), "config"), policy_for(device)

    def builder(rows: int = 1, kv_tokens: int = 4096) -> Builder:
        return Builder(config, policy, rows=rows, kv_tokens=kv_tokens)

    plans: list[Plan] = [decode_plan(builder(kv_tokens=kv_tokens)) for kv_tokens in (4096, policy.long_context)]
    plans += [sample_plan(builder(), greedy=g, logprobs=p) for g in (True, False) for p in (True, False)]
    for rows in policy.buckets:
        plans += [prefill_plan(builder(rows)), prefill_plan(builder(rows), score_top=5)]
    tiles = ("rows_per_group", "tile_m", "tile_n", "split", "slice", "renorm", "logprobs")
    return frozenset(
        (
            d.kernel.name,
            d.constants,
            d.threads,
            *((n, v) for (n, _), v in zip(d.kernel.params, d.params, strict=True) if n in tiles),
        )
        for plan in plans
        for d in plan.dispatches
    )


def test_production_width_takes_the_routes_of_the_real_model(device, production, real_metadata):
    ours, real, tiny = (
        _routes((folder / "config.json").read_text(), device.name)
        for folder in (production, real_metadata, DATA / "random-tiny")
    )
    assert ours == real
    assert tiny != real  # the comparison can tell models apart


@pytest.mark.sweep
def test_real_tokenizer_and_template(device, tmp_path, real_metadata):
    """All 248,320 rows, of which those without a token are made the likeliest: none is ever drawn."""
    config = model_config(
        hidden_size=128, vocab_size=248320, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
    )  # fmt: skip
    config["eos_token_id"] = [248046, 248044]
    folder = write_model(tmp_path / "m", config, tokenizer=real_metadata / "tokenizer")
    _raise_head_rows(folder, 248077)
    messages = [{"role": "user", "content": "Hello, what is 2 + 2?"}]
    with open_engine(folder) as engine:
        assert engine.tokenizer.num_tokens == 248077
        drawn: set[int] = set()
        for sampling in ({"temperature": 0}, {"seed": 1}, {"temperature": 3.0, "top_k": 0, "seed": 2, "logprobs": 20}):
            for reply in (
                engine.generate("Once upon a time", max_tokens=20, ignore_eos=True, **sampling),
                engine.chat(messages, max_tokens=20, ignore_eos=True, **sampling),
            ):
                drawn |= set(reply.token_ids) | {i for p in reply.logprobs or [] for i, _ in p.top}
                text = engine.tokenizer.decode(t for t in reply.token_ids if t not in engine.skip_ids())
                assert (reply.reasoning or "") + reply.text == text  # the chat's reply never ends its reasoning
        logits = current_logits(engine)
        assert logits[248077:].max() > logits[:248077].max() + 1
        assert max(drawn) < 248077
        assert len(drawn) > 50
        session = engine.session()
        first = session.send("Hello", max_tokens=5, temperature=0)
        again = session.send("And you?", max_tokens=5, temperature=0)
        assert 0 < again.cached_tokens < again.prompt_tokens
        assert first.prompt_tokens > 5


def _raise_head_rows(folder: Path, first: int) -> None:
    """Sets the biases of lm_head's rows from ``first`` on to ±9 in the file, without reading all of it."""
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))["language_model.lm_head.biases"]
        rows, groups = entry["shape"]
        values = np.where(np.arange(rows - first) % 2, -9.0, 9.0)[:, None].repeat(groups, 1)
        file.seek(8 + length + entry["data_offsets"][0] + first * groups * 2)
        file.write(bf16(values).tobytes())


# ---- other members of the family ------------------------------------------------------------------------------------

# Without a choice of experts, which rounding could change.
ALL_EXPERTS = {**SMALL, "num_experts_per_tok": 8}


@on_paths(*isa_paths())
def test_shapes_that_all_differ(device, tmp_path):
    """6 heads of 64, Dk 32, Dv 64, three value heads per key head."""
    sizes = {
        "num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "num_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 192,
        "partial_rotary_factor": 0.5, "num_hidden_layers": 3, "full_attention_interval": 3, "linear_conv_kernel_dim": 3,
    }  # fmt: skip
    folder = write_model(tmp_path / "m", model_config(**{**SMALL, **sizes}))
    check_logits(folder, device)


NOT_ON_GPUS = [
    {"head_dim": 16, "num_attention_heads": 16, "partial_rotary_factor": 0.5},
    {"linear_key_head_dim": 48},
]
OPTIONS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"norm_topk_prob": False},
    {"num_experts": 1, "num_experts_per_tok": 1},
    {"num_experts_per_tok": 8},
    {"linear_num_value_heads": 2},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"vocab_size": 1001},
    {"partial_rotary_factor": 1.0},
    {"num_hidden_layers": 1, "full_attention_interval": 1},
    {"num_hidden_layers": 2, "full_attention_interval": 9},
    {"rms_norm_eps": 0.01},
    {"linear_conv_kernel_dim": 2},
    {"linear_conv_kernel_dim": 8},
    {"hidden_size": 320},
    {"hidden_size": 96, "moe_intermediate_size": 32, "group_size": 32},  # experts whose bytes are no multiple of 256
    {"linear_value_head_dim": 48},
    *NOT_ON_GPUS,
]


@pytest.mark.parametrize("changes", sweep(OPTIONS, *OPTIONS[:2], *NOT_ON_GPUS), ids=str)
@on_paths(*fastest_paths()[-1:])
def test_options_of_the_family(device, tmp_path, changes):
    base = ALL_EXPERTS if device.rounds else SMALL
    folder = write_model(tmp_path / "m", model_config(**{**base, **changes}))
    if device.name != "cpu" and changes in NOT_ON_GPUS:
        with pytest.raises(CheckpointError, match=f"{next(iter(changes))} is"):
            open_engine(folder)
    else:
        check_logits(folder, device)


@pytest.mark.parametrize(
    ("bits", "group"), sweep([(bits, group) for bits in (4, 8) for group in (32, 64, 128)], (8, 128))
)
@on_paths(*fastest_paths())
def test_every_quantization(device, tmp_path, bits, group):
    # Random weights of seed 0 at (8, 32) amplify a rounding to bfloat16 at single positions, to an rms of 0.114; in
    # float32 the shaders are right there (test_emulated_models.py).
    folder = write_model(tmp_path / "m", model_config(**ALL_EXPERTS, bits=bits, group_size=group), seed=1)
    check_logits(folder, device)


MIXTURES: list[dict[str, Any]] = [
    {"layers.3.self_attn.v_proj": {"bits": 8}},
    {"layers.3.self_attn.q_proj": {"bits": 8}, "layers.3.self_attn.k_proj": {"group_size": 32}},
    {"layers.0.linear_attn.in_proj_z": {"bits": 8}, "layers.1.linear_attn.in_proj_qkv": {"group_size": 128}},
    {"layers.0.linear_attn.in_proj_b": {"bits": 8}, "layers.0.linear_attn.in_proj_a": {"bits": 8}},
    {"embed_tokens": {"bits": 8, "group_size": 32}, "lm_head": {"bits": 8}},
    {"layers.2.mlp.switch_mlp.down_proj": {"bits": 8}, "layers.2.mlp.shared_expert.down_proj": {"group_size": 32}},
    {f"layers.1.mlp.switch_mlp.{m}_proj": {"bits": 8, "group_size": 128} for m in ("gate", "up")},
    {f"layers.0.mlp.{m}": {"bits": 4} for m in ("gate", "shared_expert_gate")},
    {"layers.0.mlp.shared_expert_gate": {"bits": 4}, "layers.1.mlp.gate": {"bits": 4, "group_size": 32}},
]  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    sweep(MIXTURES, MIXTURES[4]),
    ids=lambda o: ",".join(m.split(".", 2)[-1] for m in o),
)
@on_paths(*fastest_paths())
def test_mixed_quantization(device, tmp_path, overrides):
    folder = write_model(tmp_path / "m", model_config(**ALL_EXPERTS, overrides=overrides))
    check_logits(folder, device)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 40}, "head_dim is 40, Lily runs multiples of 16"),
        ({"linear_key_head_dim": 40}, "linear_key_head_dim is 40, Lily runs multiples of 16"),
        ({"linear_value_head_dim": 40}, "linear_value_head_dim is 40, Lily runs multiples of 16"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is 9, Lily runs up to 8"),
    ],
    ids=lambda v: "" if isinstance(v, str) else str(v),
)
def test_shapes_that_kernels_cannot_take_are_refused(device, tmp_path, changes, words):
    config = model_config(**{**SMALL, "num_attention_heads": 16, "linear_num_value_heads": 16, **changes})
    folder = write_model(tmp_path / "m", config)
    with pytest.raises(CheckpointError, match=f"config.json: {words}"):
        open_engine(folder)


# ---- the same weights, written differently --------------------------------------------------------------------------


def _raw(tensor: Tensor) -> Tensor:
    """As Hugging Face stores it: conv1d [C, 1, K], and norms without the 1, exact in float32."""
    if tensor.name.endswith("conv1d.weight"):
        channels, taps, _ = tensor.shape
        return replace(tensor, shape=(channels, 1, taps))
    if tensor.name.endswith("norm.weight") and not tensor.name.endswith("linear_attn.norm.weight"):
        assert tensor.data is not None
        values = np.frombuffer(widen(tensor.data), np.float32) - np.float32(1)
        return replace(tensor, dtype="F32", data=values.astype("<f4").tobytes())
    return tensor


def _stored_as(dtype: str, *endings: str) -> Any:
    def change(tensor: Tensor) -> Tensor:
        if not tensor.name.endswith(endings):
            return tensor
        assert tensor.data is not None
        values = np.frombuffer(widen(tensor.data), np.float32)
        other = values.astype({"F32": "<f4", "F16": "<f2"}[dtype])
        assert (other == values).all()
        return replace(tensor, dtype=dtype, data=other.tobytes())

    return change


MTP = Tensor("mtp.layers.0.input_layernorm.weight", "BF16", (256,), bytes(512))


@pytest.mark.parametrize(
    ("name", "change", "extra"),
    [
        ("raw norms", _raw, ()), ("raw norms and mtp", _raw, (MTP,)), ("converted norms and mtp", lambda t: t, (MTP,)),
        ("A_log in float32", _stored_as("F32", "A_log"), ()),
        ("all small tensors in float32", _stored_as("F32", "A_log", "dt_bias", "norm.weight", "conv1d.weight"), ()),
        ("scales and biases in float32", _stored_as("F32", ".scales", ".biases"), ()),
        ("scales and biases in float16", _stored_as("F16", ".scales", ".biases"), ()),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_other_forms_of_the_same_weights_give_the_same_bits(device, tmp_path, name, change, extra):
    tokens = list(range(5, device.pick(45, 20)))
    draft = tiny_draft()
    draft.edit(lambda t: [change(t)])
    next(iter(draft.shards.values())).extend(extra)
    results = []
    for folder in (DATA / "random-tiny", draft.write(tmp_path / "m")):
        with open_engine(folder, ablate=["handoff"]) as engine:
            results.append((forced_logits(engine, tokens, len(tokens) - 5).tobytes(), current_state(engine)))
    assert results[0] == results[1]
