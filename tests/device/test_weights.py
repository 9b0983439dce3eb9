# SPDX-License-Identifier: Apache-2.0
"""Weights in device buffers: every element of every layout against a plain formula, nothing written elsewhere.

The layouts are decoded here from their description, byte by byte offsets, independently of lily.device.weights. Not
handled: reading files (test_checkpoint.py).
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, widen
from models import SMALL, edit_floats, model_config, tiny_draft, write_model
from paths import DATA
from reference import Reference, bf16_to_f32, read_safetensors

from lily.checkpoint.checkpoint import Checkpoint
from lily.device.weights import load_weights
from lily.errors import CheckpointError
from lily.plan.views import View
from lily.plan.weights_map import AttentionWeights, Dense, Matrix, WeightsMap, map_weights
from lily.policy import policy_for

Array = Any
FILL = 0xA5
MIXED = {
    "layers.3.self_attn.v_proj": {"bits": 8}, "layers.0.linear_attn.in_proj_z": {"bits": 8, "group_size": 128},
    "layers.1.mlp.switch_mlp.down_proj": {"bits": 8, "group_size": 32}, "embed_tokens": {"bits": 8, "group_size": 32},
}  # fmt: skip


class HostMemory:
    """What weights are put into, where no device is open."""

    def __init__(self, data: Array) -> None:
        self.data = data

    @contextmanager
    def filling(self, start: int, nbytes: int) -> Iterator[Array]:
        yield self.data[start : start + nbytes]


def load(folder: Path, device: str, fill: int = FILL) -> tuple[Checkpoint, WeightsMap, dict[str, Array], int]:
    """(the closed checkpoint, map, filled buffers, bytes reported); buffers held ``fill`` before."""
    with Checkpoint.open(folder) as checkpoint:
        weights = map_weights(checkpoint.config, policy_for(device))
        buffers = {name: np.full(size, fill, np.uint8) for name, size in weights.buffers.items()}
        reported: list[int] = []
        load_weights(checkpoint, weights, {name: HostMemory(data) for name, data in buffers.items()}, reported.append)
    return checkpoint, weights, buffers, sum(reported)


def parts_of(value: Any) -> Iterator[Matrix | Dense]:
    """All matrices and dense tensors of a map, found by its fields."""
    if isinstance(value, (Matrix, Dense)):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, View):
        for name in value.__dataclass_fields__.keys() - {"placed"}:
            yield from parts_of(getattr(value, name))


def u32(data: Array, at: Array) -> Array:
    return sum(data[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(4))


def bf16(data: Array, at: Array) -> Array:
    return bf16_to_f32(data[at].astype(np.uint16) | data[at + 1].astype(np.uint16) << np.uint16(8))


def elements(m: Matrix, data: Array) -> Array:
    """Dequantised float32 [stored rows, k] of one matrix from its bytes, by the formulas of the two layouts."""
    bits, group = m.spec.bits, m.spec.group_size
    per_word = 32 // bits
    stored = -(-m.n // 16) * 16 if m.layout == "rows16" else m.n
    row, column = np.mgrid[:stored, : m.k]
    g, word = column // group, column // per_word
    if m.layout == "rows16":
        words_per_group = group * bits // 32
        block_bytes = words_per_group * 64 + 64
        base = (row // 16 * (m.k // group) + g) * block_bytes
        word_at = base + (word - g * words_per_group) * 64 + row % 16 * 4
        scale_at = base + words_per_group * 64 + row % 16 * 2
        bias_at = scale_at + 32
    else:
        pad = lambda n: -(-n // 256) * 256  # noqa: E731
        scales = pad(m.n * m.k * bits // 8)
        word_at = (row * (m.k // per_word) + word) * 4
        scale_at = scales + (row * (m.k // group) + g) * 2
        bias_at = scale_at + pad(m.n * m.k // group * 2)
    q = u32(data, word_at) >> (column % per_word * bits).astype(np.uint32) & np.uint32(2**bits - 1)
    return bf16(data, scale_at) * q.astype(np.float32) + bf16(data, bias_at)


def check_all(folder: Path, device: str) -> None:
    """Every matrix and tensor of the map, decoded, is what the reference reads from the file."""
    _, weights, buffers, _ = load(folder, device)
    reference = Reference(folder)
    for part in parts_of(weights):
        data = buffers[part.view.buffer][part.view.offset : part.view.offset + part.view.nbytes]
        if isinstance(part, Dense):
            name = part.module if part.module in reference.tensors else part.module + ".weight"
            np.testing.assert_array_equal(data.view(np.float32), reference.tensors[name].ravel(), name)
            continue
        for expert in range(part.experts):
            values = elements(part, data[expert * part.expert_bytes : (expert + 1) * part.expert_bytes])
            rows = np.zeros(len(values), bool)
            for piece in part.parts:
                want = reference.matrix(piece.module)
                want = want[expert] if part.experts > 1 else want.reshape(piece.rows, part.k)
                np.testing.assert_array_equal(values[piece.first : piece.first + piece.rows], want, piece.module)
                rows[piece.first : piece.first + piece.rows] = True
            assert not values[~rows].any()  # padding


@pytest.mark.parametrize("device", ["cpu", "metal"])
@pytest.mark.parametrize("name", ["random-tiny", "random-tiny-vl"])
def test_every_weight_lies_where_the_layout_says(name, device):
    check_all(DATA / name, device)


@pytest.mark.parametrize("device", ["cpu", "metal"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_every_quantization_and_odd_sizes(tmp_path, device, bits, group):
    """Rows that are no multiple of 16: vocabulary, heads, router with the shared expert's gate."""
    odd = {
        "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 72, "linear_num_key_heads": 1,
        "linear_num_value_heads": 3, "linear_key_head_dim": 40, "linear_value_head_dim": 128, "vocab_size": 1003,
        "shared_expert_intermediate_size": 384, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    overrides = MIXED if (bits, group) == (4, 32) else {}
    config = model_config(**{**SMALL, **odd}, bits=bits, group_size=group, overrides=overrides)
    check_all(write_model(tmp_path / "m", config), device)


def test_segments_of_a_stack_follow_the_quantization(tmp_path):
    """v_proj at 8 bits beside q and k at 4: two matrices that write neighbouring columns."""
    config = model_config(**SMALL, overrides=MIXED)
    folder = write_model(tmp_path / "m", config)
    _, weights, _, _ = load(folder, "cpu")
    attention = weights.layers[3]
    assert isinstance(attention, AttentionWeights)
    first, second = attention.in_proj
    assert [[p.module.split(".")[-1] for p in m.parts] for m in (first, second)] == [["q_proj", "k_proj"], ["v_proj"]]
    assert (first.column, second.column) == (0, first.n)
    assert (first.spec.bits, second.spec.bits) == (4, 8)
    check_all(folder, "cpu")


def test_nothing_is_written_outside_of_the_views():
    _, weights, buffers, _ = load(DATA / "random-tiny", "cpu")
    views = [part.view for part in parts_of(weights)] + [weights.inv_freq]
    for view in views:
        assert view.offset % 256 == 0
        data = buffers[view.buffer][view.offset : view.offset + view.nbytes]
        assert not (data == FILL).all()
        data[:] = FILL
    assert all((data == FILL).all() for data in buffers.values())
    ranges = sorted((v.buffer, v.offset, v.offset + v.nbytes) for v in views)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_size_of_the_pieces_changes_nothing(monkeypatch, device):
    """Experts one at a time, several at a time, all at once."""
    results = []
    for size in (1, 100_000, 1 << 30):
        monkeypatch.setattr("lily.device.weights._PART_BYTES", size)
        _, _, buffers, _ = load(DATA / "random-tiny", device, fill=0)
        results.append({name: data.tobytes() for name, data in buffers.items()})
    assert results[0] == results[1] == results[2]


def test_every_text_tensor_is_read_exactly_once(monkeypatch):
    read: dict[str, int] = {}
    real_read, real_float = Checkpoint.read_into, Checkpoint.read_float32

    def read_into(self: Checkpoint, name: str, buffer: Any, rows: slice | None = None) -> None:
        whole = self.tensors[name]
        share = whole.nbytes if rows is None else whole.nbytes // whole.shape[0] * (rows.stop - rows.start)
        read[name] = read.get(name, 0) + share
        real_read(self, name, buffer, rows)

    def read_float32(self: Checkpoint, name: str) -> Any:
        before = read.get(name, 0)
        value = real_float(self, name)
        read[name] = before + self.tensors[name].nbytes
        return value

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    monkeypatch.setattr(Checkpoint, "read_float32", read_float32)
    monkeypatch.setattr("lily.device.weights._PART_BYTES", 100_000)
    checkpoint, _, _, reported = load(DATA / "random-tiny-vl", "cpu")
    assert read == {name: tensor.nbytes for name, tensor in checkpoint.tensors.items()}
    assert reported == checkpoint.total_bytes == sum(read.values())


def test_tied_head_has_its_own_copy_of_the_embedding(tmp_path):
    config = model_config(**SMALL, tie_word_embeddings=True)
    folder = write_model(tmp_path / "m", config)
    _, weights, _, _ = load(folder, "cpu")
    assert weights.head.parts[0].module == "embed_tokens"
    assert (weights.head.layout, weights.embed.layout) == ("rows16", "rows")
    check_all(folder, "cpu")


def test_inverse_frequencies():
    checkpoint, weights, buffers, _ = load(DATA / "random-tiny", "cpu")
    view = weights.inv_freq
    got = buffers[view.buffer][view.offset : view.offset + view.nbytes].view(np.float32)
    want = [1e7 ** (-i / 32) for i in range(32)]  # 64 of 256 dims are turned, in 32 pairs
    np.testing.assert_allclose(got, want, rtol=1e-7)
    assert checkpoint.config.rotary_dim == 64


def _raw(tensor: Tensor) -> Tensor:
    """The conv1d layout of Hugging Face, which says that norms lack their 1."""
    if tensor.name.endswith("conv1d.weight"):
        return replace(tensor, shape=(tensor.shape[0], tensor.shape[2], tensor.shape[1]))
    return tensor


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_raw_norms_get_their_one(tmp_path, dtype):
    """bfloat16 sums are rounded as a conversion would have; GDN's own norm is stored whole everywhere."""
    draft = tiny_draft().edit(lambda t: [_raw(t)])
    if dtype == "F32":
        draft.edit(
            lambda t: [replace(t, dtype="F32", data=widen(t.data)) if t.name.endswith("norm.weight") and t.data else t]
        )
    folder = draft.write(tmp_path / "m")
    stored = read_safetensors(folder / "model.safetensors")
    _, weights, buffers, _ = load(folder, "cpu")
    plus_one = 0
    for part in parts_of(weights):
        if not isinstance(part, Dense) or not part.module.endswith("norm"):
            continue
        value = stored[f"language_model.model.{part.module}.weight"].astype(np.float64)
        if not part.module.endswith("linear_attn.norm"):
            plus_one += 1
            value = value + 1
            if dtype == "BF16":  # nearest multiple of the spacing, 2^-7 from 1 and 2^-6 from 2 on; ties to even
                spacing = 2.0 ** (np.floor(np.log2(value)) - 7)
                value = np.round(value / spacing) * spacing
        got = buffers[part.view.buffer][part.view.offset : part.view.offset + part.view.nbytes].view(np.float32)
        np.testing.assert_allclose(got, value, rtol=6e-8, err_msg=part.module)
    assert plus_one == 4 * 2 + 2 + 1  # two a layer, q and k of one layer, the last one


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_scales_beyond_bfloat16_are_refused_by_name(tmp_path, dtype):
    """Rounding them would change the model in silence."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.name.endswith(("mlp.shared_expert.down_proj.scales", "mlp.shared_expert.down_proj.biases")):
            return tensor
        assert tensor.data is not None
        values = np.frombuffer(widen(tensor.data), np.float32).copy()
        if tensor.name.endswith("2.mlp.shared_expert.down_proj.scales"):
            values[5] *= np.float32(1 + 2**-9)
        return replace(tensor, dtype=dtype, data=values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes())

    folder = tiny_draft().edit(lambda t: [change(t)]).write(tmp_path / "m")
    with pytest.raises(CheckpointError, match=rf"layers\.2\.mlp\.shared_expert\.down_proj\.scales.*{dtype}.*bfloat16"):
        load(folder, "cpu")


def test_host_memory_while_loading_is_bounded(tmp_path, monkeypatch):
    """Beyond the buffers: one matrix outside of the experts (the head is the largest), or one piece of experts."""
    config = model_config(**{**SMALL, "vocab_size": 16384, "num_experts": 64, "moe_intermediate_size": 256})
    folder = write_model(tmp_path / "m", config)
    monkeypatch.setattr("lily.device.weights._PART_BYTES", 1 << 20)
    with Checkpoint.open(folder) as checkpoint:
        weights = map_weights(checkpoint.config, policy_for("cpu"))
        buffers = {name: np.zeros(size, np.uint8) for name, size in weights.buffers.items()}
        tracemalloc.start()
        load_weights(checkpoint, weights, {name: HostMemory(data) for name, data in buffers.items()})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert weights.layers[0].moe.gate_up.view.nbytes > 4 << 20
    assert peak < 1.25 * weights.head.view.nbytes + (1 << 20)


def test_damaged_values_do_not_stop_the_loading(tmp_path):
    """NaN in a scale is a matter of the logits, not of the format."""
    folder = edit_floats(tiny_draft(), "lm_head.scales", lambda v: v.fill(np.nan)).write(tmp_path / "m")
    load(folder, "cpu")
