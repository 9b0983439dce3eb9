# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with one named fault each: the message must say which file or tensor, what was seen, what is allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import INDEX, PREFIX, Draft, Tensor, header_bytes, write_shard
from paths import DATA
from safetensors import SafetensorError, safe_open

from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.safetensors_file import open_shards
from lily.errors import CheckpointError

TINY = DATA / "random-tiny"
TINY_VL = DATA / "random-tiny-vl"


@pytest.fixture(scope="module")
def tiny_draft() -> Draft:
    return Draft.load(TINY, values=False)


@pytest.fixture
def tiny(tiny_draft: Draft) -> Draft:
    return tiny_draft.copy()


def refused(draft: Draft, folder: Path, *words: str) -> str:
    """Writes and open; returns the message, which must hold all the words."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(draft.write(folder))
    message = str(caught.value)
    for word in words:
        assert word in message
    return message


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open("a\0b")
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint.open(TINY / "model.safetensors")


def test_missing_tensors_are_counted(tiny: Draft, tmp_path: Path) -> None:
    tiny.edit(lambda t: [] if "layers.3.self_attn.k_proj" in t.name else [t])
    refused(tiny, tmp_path, "layers.3.self_attn.k_proj.weight and 2 more of 182 is missing")


@pytest.mark.parametrize(
    "name",
    [
        PREFIX + "layers.4.input_layernorm.weight",
        PREFIX + "layers.0.self_attn.q_norm.weight",
        PREFIX + "layers.0.mlp.gate.bias",
        PREFIX + "layers.00.input_layernorm.weight",
        "language_model.norm.weight",
        "language_model.model.lm_head.weight",
        "model.norm.weight",
        "lm_head.weight",
        "norm.weight",
        "",
        "\ud800",
        "language_model.model.",
    ],
)
def test_tensors_the_model_does_not_have_are_named(tiny: Draft, tmp_path: Path, name: str) -> None:
    extra = Tensor(name, "BF16", (256,))
    tiny.shards["model.safetensors"].append(extra)
    refused(tiny, tmp_path, ascii(name))


def test_a_head_beside_tied_embeddings_is_named(tiny: Draft, tmp_path: Path) -> None:
    tiny.text_config["tie_word_embeddings"] = True
    refused(tiny, tmp_path, "lm_head", "tie_word_embeddings is true")


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("norm.weight", {"shape": (128,)}, ["[128]", "expected [256]"]),
        ("norm.weight", {"shape": (256, 1)}, ["[256, 1]", "expected [256]"]),
        ("norm.weight", {"dtype": "U8", "shape": (256,)}, ["U8", "BF16 or F32 or F16"]),
        ("layers.0.linear_attn.A_log", {"dtype": "I32"}, ["A_log", "I32"]),
        ("layers.0.linear_attn.conv1d.weight", {"shape": (4, 1024, 1)}, ["conv1d", "expected [1024, 4, 1]"]),
        ("layers.1.linear_attn.conv1d.weight", {"shape": (1024, 1, 4)}, ["conv1d", "expected [1024, 4, 1]"]),
        ("layers.0.mlp.gate.scales", {"dtype": "U32"}, ["scales", "U32"]),
        ("layers.0.mlp.gate.biases", {"dtype": "F16"}, ["biases", "F16", "expected BF16 as its scales"]),
        ("lm_head.weight", {"shape": (1024, 64)}, ["8 bits and 4 groups for 256 inputs", "expected 4 bits"]),
        ("layers.0.mlp.gate.weight", {"shape": (8, 32)}, ["4 bits and 4 groups for 256 inputs", "expected 8 bits"]),
        ("lm_head.weight", {"shape": (1024, 24)}, ["3 bits", "expected 4 bits"]),
        ("lm_head.weight", {"shape": (1023, 32)}, ["[1023, 32]", "expected [1024, 32]"]),
        ("lm_head.weight", {"shape": (32,)}, ["[32]", "expected [1024, 32]"]),
        ("lm_head.weight", {"shape": ()}, ["[]", "expected [1024, 32]"]),
        ("lm_head.weight", {"shape": (1024, 0)}, ["0 bits"]),
        ("lm_head.scales", {"shape": (1024, 8)}, ["4 bits and 8 groups for 256 inputs", "groups of 64"]),
        ("lm_head.weight", {"dtype": "F32"}, ["F32", "not quantized", "mlx_lm.convert -q"]),
        ("lm_head.weight", {"dtype": "BF16", "shape": (1024, 256)}, ["not quantized"]),
    ],
)
def test_wrong_shapes_types_and_bits_are_named(
    tiny: Draft, tmp_path: Path, name: str, edit: dict[str, object], words: list[str]
) -> None:
    tiny.change(name, lambda tensor: [replace(tensor, **edit)])  # type: ignore[arg-type]
    refused(tiny, tmp_path, name, *words)


def test_an_unquantized_module_is_named_before_its_missing_scales(tiny: Draft, tmp_path: Path) -> None:
    tiny.edit(lambda t: [] if t.name.endswith(("k_proj.scales", "k_proj.biases")) else [t])
    tiny.change("layers.3.self_attn.k_proj.weight", lambda t: [replace(t, dtype="BF16", shape=(512, 256))])
    refused(tiny, tmp_path, "k_proj.weight", "not quantized")


def test_a_missing_or_linked_away_shard_is_named(tmp_path: Path) -> None:
    draft = Draft.load(TINY_VL, values=False)
    shard = draft.write(tmp_path) / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is missing"):
        Checkpoint.open(tmp_path)
    shard.symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is a link to a missing file"):
        Checkpoint.open(tmp_path)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=r"is not a regular file"):
        Checkpoint.open(tmp_path)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=r"is not a regular file|cannot be opened"):
        Checkpoint.open(tmp_path)


def test_index_and_shards_must_say_the_same(tmp_path: Path) -> None:
    draft = Draft.load(TINY_VL, values=False)
    first, second = draft.shards
    index = draft.auto_index()
    name = PREFIX + "norm.weight"

    def variant(number: int, edit: Callable[[dict[str, str]], object], *words: str) -> None:
        draft.index = json.loads(json.dumps(index))
        edit(draft.index["weight_map"])
        refused(draft, tmp_path / str(number), *words)

    other = second if index["weight_map"][name] == first else first
    variant(0, lambda m: m.pop(name), name, "is not in model.safetensors.index.json")
    variant(1, lambda m: m.update({name: other}), name, other)
    variant(2, lambda m: m.update({PREFIX + "layers.9.x": first}), "layers.9.x", "does not hold")
    variant(3, lambda m: m.update({name: "model-00003-of-00003.safetensors"}), "model-00003", "is missing")
    variant(4, lambda m: m.clear(), "weight_map is {}")
    for bad in ("../model.safetensors", "/etc/passwd", "a\0.safetensors", "", "x.bin", 3, None, ["a.safetensors"]):
        draft.index = {"weight_map": {**index["weight_map"], name: bad}}
        refused(draft, tmp_path / "names", name, "expected the name of a .safetensors file")
    draft.index = {"metadata": {}}
    refused(draft, tmp_path / "none", "weight_map is None")


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    draft = Draft.load(TINY_VL, values=False)
    first, second = draft.shards.values()
    second.append(first[0])
    refused(draft, tmp_path, first[0].name, "is also in model-00001-of-00002.safetensors")


def test_stray_shards_are_named(tiny: Draft, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    stray = tmp_path / "model-00001-of-00004.safetensors"
    write_shard(stray, [])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00004\.safetensors' does not belong to the index"):
        Checkpoint.open(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"does not belong to model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_shards_without_index_or_no_weights_at_all_are_named(tmp_path: Path) -> None:
    draft = Draft.load(TINY_VL, values=False)
    draft.index = None
    refused(draft, tmp_path / "a", INDEX, "is missing, beside 2 shards")
    draft.shards = {}
    refused(draft, tmp_path / "b", "no model.safetensors")


def test_a_tensor_named_twice_in_a_header_is_an_error(tiny: Draft, tmp_path: Path) -> None:
    path = tiny.write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    old, new = b"layers.0.linear_attn.in_proj_a.scales", b"layers.0.linear_attn.in_proj_b.scales"
    assert data.count(old) == data.count(new) == 1
    path.write_bytes(data.replace(old, new))
    with pytest.raises(CheckpointError, match="duplicate key"):
        Checkpoint.open(tmp_path)


def u8(*shape: object, at: list[object]) -> dict[str, object]:
    return {"dtype": "U8", "shape": list(shape), "data_offsets": at}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"mtp.a": u8(4, at=[0, 4]), "mtp.b": u8(2, at=[4, 6])}, 6, None),
        ({"mtp.a": u8(4, at=[0, 4]), "mtp.b": u8(4, at=[2, 6])}, 6, "'mtp.b' at byte .* overlaps 'mtp.a'"),
        ({"mtp.a": u8(4, at=[0, 4]), "mtp.b": u8(2, at=[1, 3])}, 4, "'mtp.b' at byte .* overlaps 'mtp.a'"),
        ({"mtp.a": u8(4, at=[0, 4]), "mtp.b": u8(2, at=[5, 7])}, 7, "'mtp.b' at byte .* hole after 'mtp.a'"),
        ({"mtp.a": u8(4, at=[1, 5])}, 5, "'mtp.a' at byte .* hole after the header"),
        ({"mtp.a": u8(4, at=[0, 4])}, 3, "truncated"),
        ({"mtp.a": u8(4, at=[0, 4])}, 5, "1 bytes follow"),
        ({}, 1, "1 bytes follow"),
        ({"mtp.a": u8(True, at=[0, 1])}, 1, "shape is"),
        ({"mtp.a": u8(1, at=[0, True])}, 1, "data_offsets are"),
        ({"mtp.a": u8(0, at=[0, 0]), "mtp.b": u8(1, at=[0, 1])}, 1, None),
        ({"mtp.a": u8(*[1] * 9, at=[0, 1])}, 1, "shape is .* up to 8"),
        ({"mtp.a": u8(*[1 << 62] * 100_000, at=[0, 1])}, 1, "shape is .* up to 8"),
        ({"__metadata__": {"a": "b"}}, 0, None),
        ({"__metadata__": None, "mtp.a": u8(4, at=[0, 4])}, 4, None),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ is .* expected an object of strings"),
        ({"__metadata__": []}, 0, "__metadata__ is "),
        ({"mtp.\ud800": u8(1, at=[0, 1])}, 1, r"'mtp\.\\ud800': the name has a lone surrogate"),
        ({"mtp.c": u8(2, at=[0, 2]), "mtp.a": u8(0, at=[2, 2]), "mtp.b": u8(1, at=[2, 3])}, 3, None),
    ],
)
def test_every_byte_belongs_to_one_tensor(tmp_path: Path, header: object, data: int, words: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_bytes(header) + bytes(data))
    with ExitStack() as stack:
        if words is None:
            assert sum(tensor.nbytes for tensor in open_shards(tmp_path, stack).tensors.values()) == data
        else:
            with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{words}"):
                open_shards(tmp_path, stack)


class PanicException(BaseException):
    """A panic of a library, of which the real class cannot be imported."""


@pytest.mark.parametrize("error", [SafetensorError("header too odd"), PanicException("header too odd")])
def test_what_only_the_library_refuses_is_an_error_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lily.checkpoint.safetensors_file.safe_open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not valid safetensors: header too odd; download"):
        Checkpoint.open(TINY)


def test_a_file_that_is_exchanged_while_it_is_opened_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_bytes({"mtp.a": u8(4, at=[0, 4])}) + bytes(4))
    (tmp_path / "new").write_bytes(header_bytes({"mtp.b": u8(4, at=[0, 4])}) + bytes(4))
    monkeypatch.setattr(
        "lily.checkpoint.safetensors_file.safe_open", lambda path, framework: safe_open(tmp_path / "new", framework)
    )
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was opened"):
        open_shards(tmp_path, stack)


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 20, 1 << 30, 1 << 63, (1 << 64) - 1])
def test_impossible_header_lengths_are_named(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with ExitStack() as stack, pytest.raises(CheckpointError, match=rf"header length is {length}, expected 2 to"):
        open_shards(tmp_path, stack)


@pytest.mark.parametrize(
    "content",
    [
        b"{}{",
        b"[]",
        b'"\xff"',
        b'{"temperature": -1}',
        b'{"temperature": "hot"}',
        b'{"top_p": 1.5}',
        b'{"top_p": 0}',
        b'{"repetition_penalty": 0}',
        b'{"top_k": 2147483648}',
        b'{"top_k": -2}',
        b'{"temperature": 100.5, "do_sample": false}',
        b'{"top_k": 2.5}',
        b'{"top_k": true}',
        b'{"min_p": 1e999}',
        b'{"do_sample": 1}',
        b'{"eos_token_id": "x"}',
        b'{"eos_token_id": [1, 1024]}',
        b"",
    ],
)
def test_generation_configs_of_no_sense_are_named(tiny: Draft, tmp_path: Path, content: bytes) -> None:
    tiny.files["generation_config.json"] = content
    assert len(refused(tiny, tmp_path, "generation_config.json: ")) <= 500


def test_a_setting_of_unbounded_length_gives_a_short_message(tiny: Draft, tmp_path: Path) -> None:
    tiny.files["generation_config.json"] = json.dumps({"temperature": "x" * 10_000}).encode()
    assert len(refused(tiny, tmp_path, "generation_config.json: temperature is 'xxx")) <= 500


def test_an_override_of_a_module_that_is_not_there_is_named(tiny: Draft, tmp_path: Path) -> None:
    for section in (tiny.config["quantization"], tiny.config["quantization_config"]):
        section["model.layers.0.mlp.router"] = {"group_size": 64, "bits": 8}
    refused(tiny, tmp_path, "config.json: quantization['layers.0.mlp.router'] names no quantized module")
