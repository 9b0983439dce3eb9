# SPDX-License-Identifier: Apache-2.0
"""Writers of checkpoints for tests: edited copies, sparse ones, and synthetic ones of any size.

Independent of lily.safetensors_file: headers are written, and read back, with struct and json alone.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lily.checkpoint.config import ModelConfig
from lily.checkpoint.tensors import ExpectedTensor, expected_tensors

PREFIX = "language_model.model."
INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {"U32": 4, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. Without data the file gets a hole, which reads as zeros and takes no disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * int(np.prod(self.shape, dtype=np.int64))


@dataclass
class Draft:
    """A checkpoint in memory, to edit and write. ``index`` None: no index is written; "auto": it matches the shards."""

    config: dict[str, Any]
    shards: dict[str, list[Tensor]]
    index: Any = "auto"
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, values: bool = True) -> Draft:
        """From a folder; values=False leaves the data out, which makes writing a copy cheap."""
        shards = {path.name: read_tensors(path, values) for path in sorted(folder.glob("*.safetensors"))}
        small = {path.name: path.read_bytes() for path in folder.iterdir() if path.stat().st_size < 100_000}
        kept = {name: data for name, data in small.items() if name.startswith(("tokenizer", "chat", "generation"))}
        return cls(json.loads(small["config.json"]), shards, "auto", kept)

    def copy(self) -> Draft:
        shards = {name: list(tensors) for name, tensors in self.shards.items()}
        return Draft(copy.deepcopy(self.config), shards, copy.deepcopy(self.index), dict(self.files))

    @property
    def text_config(self) -> dict[str, Any]:
        result: dict[str, Any] = self.config["text_config"]
        return result

    def edit(self, change: Callable[[Tensor], Iterable[Tensor]]) -> Draft:
        """Replaces every tensor by what ``change`` returns for it."""
        self.shards = {name: [new for old in tensors for new in change(old)] for name, tensors in self.shards.items()}
        return self

    def change(self, name: str, change: Callable[[Tensor], Iterable[Tensor]]) -> Draft:
        """The same for the one tensor of that name after the prefix."""
        full = f"language_model.{name}" if name.startswith("lm_head") else PREFIX + name
        assert full in self.auto_index()["weight_map"], full
        return self.edit(lambda tensor: change(tensor) if tensor.name == full else [tensor])

    def rename(self, change: Callable[[str], str]) -> Draft:
        return self.edit(lambda tensor: [replace(tensor, name=change(tensor.name))])

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        for name, tensors in self.shards.items():
            write_shard(folder / name, tensors)
        if self.index is not None:
            (folder / INDEX).write_text(json.dumps(self.auto_index() if self.index == "auto" else self.index))
        return folder

    def auto_index(self) -> dict[str, Any]:
        weight_map = {tensor.name: name for name, tensors in self.shards.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors)
        return {"metadata": {"total_size": total}, "weight_map": weight_map}


def layout(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The header of a file that holds these tensors in this order, sorted by name as MLX writes it."""
    entries = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"data_offsets": [offset, end], "dtype": tensor.dtype, "shape": list(tensor.shape)}
        offset = end
    return {"__metadata__": {"format": "mlx"}, **{name: entries[name] for name in sorted(entries)}}


def header_bytes(header: object) -> bytes:
    """Length and JSON, compact and without padding."""
    data = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(data)) + data


def write_shard(path: Path, tensors: list[Tensor]) -> None:
    """A file with the tensors' data in the given order; holes where a tensor has none."""
    with path.open("wb") as file:
        file.write(header_bytes(layout(tensors)))
        end = file.tell()
        for tensor in tensors:
            if tensor.data is not None:
                assert len(tensor.data) == tensor.nbytes, tensor.name
                file.seek(end)
                file.write(tensor.data)
            end += tensor.nbytes
        file.truncate(end)


def read_tensors(path: Path, values: bool = True) -> list[Tensor]:
    """All tensors of a sound file, in order of their data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        result = []
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            data = file.read(entry["data_offsets"][1] - entry["data_offsets"][0]) if values else None
            result.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), data))
        return result


def bf16(values: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round to nearest even; the bits of each value."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(bits: bytes) -> bytes:
    """BF16 data as F32 data, exactly."""
    return (np.frombuffer(bits, "<u2").astype("<u4") << 16).tobytes()


def write_synthetic(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint with random weights for any config of the family, as one file, written tensor by tensor.

    Weights are scaled so that activations keep their size: outputs of a module have about the variance of its inputs.
    """
    model = ModelConfig.from_dict(config, "synthetic config")
    folder.mkdir(parents=True, exist_ok=True)
    forms = expected_tensors(model)
    tensors = [Tensor(_file_name(name), form.dtypes[0], form.shape) for name, form in forms.items()]
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_bytes(layout(tensors)))
        for number, name in enumerate(forms):
            file.write(_synthetic_values(name, forms[name], model, np.random.default_rng((seed, number))))
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {tensor.name: "model.safetensors" for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _file_name(name: str) -> str:
    return f"language_model.{name}" if name.startswith("lm_head.") else PREFIX + name


def _synthetic_values(name: str, form: ExpectedTensor, model: ModelConfig, rng: np.random.Generator) -> bytes:
    module, _, part = name.rpartition(".")
    shape, spec = form.shape, model.quantization_of(module)
    if form.dtypes == ("U32",):
        return rng.bytes(4 * int(np.prod(shape)))
    if part in ("scales", "biases"):
        levels = 2**spec.bits - 1
        inputs = shape[-1] * spec.group_size
        scale = np.sqrt(12 / (levels * (levels + 2)) / inputs)  # of uniform integers 0..levels
        jitter = 1 + 0.1 * rng.standard_normal(shape) if part == "scales" else np.ones(shape)
        return bf16(scale * jitter if part == "scales" else -scale * levels / 2 * jitter).tobytes()
    if "norm" in name:
        return bf16(1 + 0.1 * rng.standard_normal(shape)).tobytes()
    spread = {"A_log": 0.5, "dt_bias": 1.0}.get(part, 0.3)
    return bf16((0.5 if part == "A_log" else 0.0) + spread * rng.standard_normal(shape)).tobytes()
