# SPDX-License-Identifier: Apache-2.0
"""Opening and reading checkpoints: what is consumed, what is skipped, and that values arrive exactly."""

from __future__ import annotations

import collections
import gc
import hashlib
import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoints import INDEX, Draft, Tensor, widen, write_shard, write_synthetic
from needs import REAL_DATA
from paths import DATA, EMBEDDED

from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.config import QuantSpec
from lily.errors import CheckpointError
from lily.sampling import checkpoint_defaults

TINY = DATA / "random-tiny"
TINY_VL = DATA / "random-tiny-vl"


@pytest.fixture(scope="module")
def tiny_draft() -> Draft:
    """random-tiny without its values: cheap to write, and checked like any other."""
    return Draft.load(TINY, values=False)


@pytest.fixture
def tiny(tiny_draft: Draft) -> Draft:
    return tiny_draft.copy()


@pytest.fixture(scope="module")
def valued_draft() -> Draft:
    return Draft.load(TINY)


@pytest.fixture
def valued(valued_draft: Draft) -> Draft:
    return valued_draft.copy()


# ---------------------------------------------------------------------------------------------- sound checkpoints


@pytest.mark.parametrize(
    ("folder", "text", "skipped", "total"),
    [(TINY, 182, 0, 3_693_808), (TINY_VL, 182, 21, 3_693_808), (EMBEDDED, 357, 0, 21_307_088)],
)
def test_committed_checkpoints_open(folder: Path, text: int, skipped: int, total: int) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.text_tensor_count == text
        assert len(checkpoint.skipped) == skipped
        assert all(name.startswith("vision_tower.") for name in checkpoint.skipped)
        assert checkpoint.total_bytes == total
        assert not checkpoint.raw_norms
        assert checkpoint.path == folder


@pytest.mark.parametrize("folder", [TINY, TINY_VL, EMBEDDED])
def test_every_value_equals_the_safetensors_library(folder: Path) -> None:
    seen = 0
    with Checkpoint.open(folder) as checkpoint:
        ours = {tensor.name: name for name, tensor in checkpoint.tensors.items()}
        for path in folder.glob("*.safetensors"):
            for name, view in safetensors.deserialize(path.read_bytes()):
                if name in ours:
                    tensor = checkpoint.tensors[ours[name]]
                    assert (tensor.dtype, tensor.shape) == (view["dtype"], tuple(view["shape"]))
                    assert checkpoint.read(ours[name]).tobytes() == bytes(view["data"])
                    seen += 1
        assert seen == checkpoint.text_tensor_count


def test_a_module_may_be_split_over_shards() -> None:
    with Checkpoint.open(TINY_VL) as split, Checkpoint.open(TINY) as whole:
        module = split.quantized("layers.0.linear_attn.in_proj_qkv")
        assert module.scales.path != module.weight.path
        assert (module.out_features, module.in_features, module.experts) == (1024, 256, None)
        for name in split.tensors:
            assert np.array_equal(split.read(name), whole.read(name))


def test_quantized_modules_carry_their_own_bits_and_logical_sizes() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        router = checkpoint.quantized("layers.2.mlp.gate")
        assert (router.spec, router.out_features, router.in_features) == (QuantSpec(8, 64), 8, 256)
        assert router.weight.shape == (8, 64)
        experts = checkpoint.quantized("language_model.model.layers.2.mlp.switch_mlp.down_proj")
        assert (experts.spec, experts.experts) == (QuantSpec(4, 64), 8)
        assert (experts.out_features, experts.in_features) == (256, 128)
        with pytest.raises(KeyError):
            checkpoint.quantized("layers.2.mlp.router")


def test_end_of_text_ids_are_the_union(tiny: Draft, tmp_path: Path) -> None:
    tiny.files["generation_config.json"] = json.dumps({"eos_token_id": [7, 0, 960], "top_k": None}).encode()
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        assert checkpoint.eos_token_ids == (962, 960, 7, 0)
        assert checkpoint.generation_config == {"eos_token_id": [7, 0, 960]}
        assert checkpoint.notes == ()


@pytest.mark.parametrize(("written", "used"), [("20.0", 20), ("-1", 0), ("-1.0", 0), ("2147483647", 2147483647)])
def test_top_k_is_read_in_every_usual_form(tiny: Draft, tmp_path: Path, written: str, used: int) -> None:
    tiny.files["generation_config.json"] = f'{{"top_k": {written}, "temperature": 1}}'.encode()
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        top_k = checkpoint_defaults(checkpoint.generation_config)["top_k"]
    assert (top_k, type(top_k)) == (used, int)


def test_without_settings_of_the_checkpoint_replies_are_greedy() -> None:
    assert checkpoint_defaults({}) == {"temperature": 0.0}
    assert checkpoint_defaults({"top_k": 5}) == {"temperature": 0.0, "top_k": 5}
    assert checkpoint_defaults({"temperature": 0.7}) == {"temperature": 0.7}
    assert checkpoint_defaults({"temperature": 0.7, "do_sample": False}) == {"temperature": 0.0}
    assert checkpoint_defaults({"do_sample": True}) == {}


def test_generation_config_is_optional(tiny: Draft, tmp_path: Path) -> None:
    tiny.files.clear()
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        assert checkpoint.generation_config == {}
        [note] = checkpoint.notes
        assert note == "no generation_config.json: replies are greedy (temperature 0) unless options say otherwise"
        assert checkpoint.eos_token_ids == (962, 960)


def test_without_index_a_single_file_is_enough(tiny: Draft, tmp_path: Path) -> None:
    tiny.index = None
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        assert checkpoint.text_tensor_count == 182


def test_text_only_names_mean_the_same(valued: Draft, tmp_path: Path) -> None:
    valued.rename(lambda name: name.removeprefix("language_model."))
    with Checkpoint.open(valued.write(tmp_path)) as plain, Checkpoint.open(TINY) as original:
        assert plain.tensors["norm.weight"].name == "model.norm.weight"
        assert plain.tensors.keys() == original.tensors.keys()
        assert np.array_equal(plain.read("lm_head.weight"), original.read("lm_head.weight"))


def test_tied_embeddings_need_no_head(tiny: Draft, tmp_path: Path) -> None:
    tiny.text_config["tie_word_embeddings"] = True
    tiny.edit(lambda tensor: [] if "lm_head" in tensor.name else [tensor])
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        assert checkpoint.text_tensor_count == 179
        with pytest.raises(KeyError):
            checkpoint.quantized("lm_head")


def test_float32_vectors_and_scales_read_as_the_same_numbers(valued: Draft, tmp_path: Path) -> None:
    def as_f32(tensor: Tensor) -> list[Tensor]:
        if tensor.dtype == "U32" or "layers.0" not in tensor.name:
            return [tensor]
        assert tensor.data is not None
        return [replace(tensor, dtype="F32", data=widen(tensor.data))]

    with Checkpoint.open(valued.edit(as_f32).write(tmp_path)) as wide, Checkpoint.open(TINY) as original:
        for name in ("linear_attn.A_log", "linear_attn.norm.weight", "input_layernorm.weight", "mlp.gate.scales"):
            assert wide.tensors[f"layers.0.{name}"].dtype == "F32"
            read = wide.read_float32(f"layers.0.{name}")
            assert read.dtype == np.float32
            assert np.array_equal(read, original.read_float32(f"layers.0.{name}"))


def test_bf16_and_f16_read_as_exact_floats(valued: Draft, tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 0.099975586, 0.0], np.float16)
    valued.change("layers.0.linear_attn.A_log", lambda t: [replace(t, dtype="F16", data=values.tobytes())])
    bits = np.array([0x3F80, 0xC020, 0x3DCD, 0x7F80], np.uint16).tobytes()  # 1, -2.5, 0.10009765625, inf
    valued.change("layers.0.linear_attn.dt_bias", lambda t: [replace(t, data=bits)])
    with Checkpoint.open(valued.write(tmp_path)) as checkpoint:
        assert np.array_equal(checkpoint.read_float32("layers.0.linear_attn.A_log"), values.astype(np.float32))
        assert checkpoint.read_float32("layers.0.linear_attn.dt_bias").tolist() == [1, -2.5, 0.10009765625, np.inf]
        with pytest.raises(TypeError):
            checkpoint.read_float32("lm_head.weight")


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_raw_norms_follow_conv1d_alone_whether_or_not_mtp_is_there(
    tiny: Draft, tmp_path: Path, raw: bool, mtp: bool
) -> None:
    if raw:
        tiny.edit(lambda t: [replace(t, shape=(t.shape[0], 1, t.shape[1]))] if "conv1d" in t.name else [t])
    names = ("mtp.fc.weight", "language_model.mtp.norm.weight", "model.mtp.layers.0.input_layernorm.weight")
    if mtp:
        tiny.shards["model.safetensors"] += [Tensor(name, "BF16", (3, 5)) for name in names]
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        assert checkpoint.raw_norms is raw
        assert set(checkpoint.skipped) == (set(names) if mtp else set())
        assert checkpoint.text_tensor_count == 182


def test_mtp_file_beside_the_shards_is_left_alone(tiny: Draft, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    (tmp_path / "mtp.safetensors").write_bytes(b"not read")
    Checkpoint.open(tmp_path).close()


def test_other_sizes_of_the_family_open(tiny: Draft, tmp_path: Path) -> None:
    tiny.text_config.update(
        hidden_size=384,
        num_attention_heads=6,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    )
    for key in ("quantization", "quantization_config"):
        tiny.config[key] = {"bits": 8, "group_size": 32, "lm_head": {"bits": 4, "group_size": 128}}
    with Checkpoint.open(write_synthetic(tmp_path, tiny.config)) as checkpoint:
        assert checkpoint.quantized("lm_head").scales.shape == (1024, 3)
        assert checkpoint.quantized("layers.0.linear_attn.out_proj").weight.shape == (384, 96)


# ------------------------------------------------------------------------------------------------------- reading


def test_rows_are_read_into_the_callers_buffer() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        name = "layers.1.mlp.switch_mlp.up_proj.weight"
        whole = checkpoint.read(name)
        part = np.zeros((4, *whole.shape[1:]), np.uint32)
        checkpoint.read_into(name, part[1:3], rows=slice(5, 7))
        assert np.array_equal(part[1:3], whole[5:7])
        assert not part[0].any()
        assert not part[3].any()
        checkpoint.read_into(name, part, rows=slice(-4, None))
        assert np.array_equal(part, whole[-4:])


def test_buffers_that_do_not_fit_are_refused() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        size = checkpoint.tensors["norm.weight"].nbytes
        for buffer in (bytearray(size - 1), bytearray(size + 1), bytes(size)):
            with pytest.raises(ValueError, match="writable"):
                checkpoint.read_into("norm.weight", buffer)
        for rows in (slice(0, 257), slice(3, 3), slice(0, 8, 2)):
            with pytest.raises(ValueError, match="rows"):
                checkpoint.read_into("norm.weight", bytearray(size), rows)
        with pytest.raises(KeyError):
            checkpoint.read_into("norm", bytearray(size))


def test_short_reads_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(TINY) as checkpoint:
        whole = checkpoint.read("layers.3.self_attn.q_proj.scales")
        preadv = os.preadv
        calls = []

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return preadv(descriptor, [buffers[0][:1001]], offset)

        monkeypatch.setattr(os, "preadv", short)
        assert np.array_equal(checkpoint.read("layers.3.self_attn.q_proj.scales"), whole)
        assert len(calls) == -(-whole.nbytes // 1001)


def test_a_file_cut_after_opening_is_an_error(tiny: Draft, tmp_path: Path) -> None:
    with Checkpoint.open(tiny.write(tmp_path)) as checkpoint:
        last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].offset)
        os.truncate(tmp_path / "model.safetensors", checkpoint.tensors[last].offset + 1)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* ends at byte .*changed"):
            checkpoint.read(last)


def test_read_errors_of_the_disk_name_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with Checkpoint.open(TINY) as checkpoint:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(CheckpointError, match=r"norm\.weight.*Input/output error"):
            checkpoint.read("norm.weight")


def test_files_are_closed_on_every_path(tiny: Draft, tmp_path: Path) -> None:
    gc.collect()
    before = _open_files()
    checkpoint = Checkpoint.open(TINY_VL)
    assert _open_files() == before + 2
    checkpoint.close()
    checkpoint.close()
    assert _open_files() == before
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("norm.weight")
    with pytest.raises(CheckpointError):
        Checkpoint.open(tiny.change("norm.weight", lambda tensor: []).write(tmp_path))
    assert _open_files() == before
    Checkpoint.open(TINY)
    gc.collect()
    assert _open_files() == before


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


# ------------------------------------------------------------------------------------------------- the real model

# Data of the published shards begins at these bytes; the number picks an order of the tensors that gives it.
REAL_SHARDS = {
    "model-00001-of-00004.safetensors": (5_288_196_018, 88_914, 58),
    "model-00002-of-00004.safetensors": (5_368_472_749, 67_245, 48),
    "model-00003-of-00004.safetensors": (5_368_324_139, 67_883, 432),
    "model-00004-of-00004.safetensors": (4_377_211_365, 50_277, 12_790),
}


def write_real_model(folder: Path, metadata: Path) -> None:
    """Sparse shards with the published model's names, shapes, sizes and unpadded headers."""
    shards: dict[str, list[Tensor]] = collections.defaultdict(list)
    for line in (metadata / "tensors.tsv").read_text().splitlines()[1:]:
        name, dtype, shape, nbytes, shard = line.split("\t")
        shards[shard].append(Tensor(name, dtype, tuple(json.loads(shape))))
        assert shards[shard][-1].nbytes == int(nbytes)
    for shard, (_, _, seed) in REAL_SHARDS.items():
        order = sorted(shards[shard], key=lambda t: hashlib.sha256(f"{seed}:{t.name}".encode()).digest())
        write_shard(folder / shard, order)
    for name in ("config.json", INDEX):
        (folder / name).write_bytes((metadata / name).read_bytes())


def bytes_touched() -> int:
    """At most so many bytes were mapped in, or read where the system tells, since the process began."""
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt * 16  # which is the most that one fault brings
    io = Path("/proc/self/io")
    return pages * resource.getpagesize() + (int(io.read_text().split()[1]) if io.exists() else 0)


def test_the_real_model_opens_from_its_metadata(tmp_path: Path) -> None:
    metadata = os.environ.get("LILY_TEST_DATA")
    if not metadata:
        pytest.skip(REAL_DATA)
    write_real_model(tmp_path, Path(metadata))
    for shard, (size, begin, _) in REAL_SHARDS.items():
        info = (tmp_path / shard).stat()
        assert info.st_size == size
        assert info.st_blocks * 512 < 1 << 20
        with (tmp_path / shard).open("rb") as file:
            assert int.from_bytes(file.read(8), "little") + 8 == begin
    before, touched = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, bytes_touched()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.text_tensor_count == 1757
        assert len(checkpoint.skipped) == 333
        assert checkpoint.total_bytes == 19_508_787_456
        assert not checkpoint.raw_norms
        offsets = {tensor.path.name: tensor.offset for tensor in checkpoint.tensors.values() if tensor.offset % 2}
        assert len(offsets) == 3  # the three odd beginnings
        layer20 = checkpoint.quantized("layers.20.linear_attn.in_proj_qkv")
        assert layer20.weight.path != layer20.biases.path
        rows = np.ones((2, 2048 // 8), np.uint32)
        checkpoint.read_into("lm_head.weight", rows, slice(248_318, 248_320))
        assert not rows.any()
    assert bytes_touched() - touched < 1 << 30, "of 20 GB"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if os.uname().sysname == "Darwin" else 1024) < 64 << 20
