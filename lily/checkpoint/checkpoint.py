# SPDX-License-Identifier: Apache-2.0
"""An MLX affine checkpoint: opened and checked as a whole without reading tensor data, then read tensor by tensor.

``Checkpoint.open`` holds every text tensor against what the config implies, so that later reads cannot meet a missing,
misshapen or unexpected tensor. Data goes by preadv straight into the caller's buffer; no file is mapped or read whole.
Not handled: unquantized linear modules, and vision and MTP tensors, which are skipped by name.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from lily.bf16 import bf16_to_f32
from lily.checkpoint.config import ModelConfig, QuantSpec, canonical_name, is_skipped
from lily.checkpoint.generation_config import GENERATION_CONFIG_FILE, eos_token_ids, read_generation_config
from lily.checkpoint.safetensors_file import Shards, TensorInfo, open_shards
from lily.checkpoint.tensors import (
    FLOAT_DTYPES,
    ExpectedTensor,
    check_overrides,
    expected_tensors,
    quantized_modules,
)
from lily.errors import CheckpointError, show

__all__ = ["Checkpoint", "ExpectedTensor", "QuantizedInfo", "TensorInfo", "expected_tensors"]

# macOS refuses reads of 2 GiB and more; Linux shortens them.
_READ_BYTES = 1 << 30
_SAMPLE_BYTES = 4096
NO_GENERATION_CONFIG = f"no {GENERATION_CONFIG_FILE}: replies are greedy (temperature 0) unless options say otherwise"
_STORAGE = {"U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True)
class QuantizedInfo:
    """One quantized module: packed U32 weight [.., out, in * bits / 32], scales and biases [.., out, in / group]."""

    weight: TensorInfo
    scales: TensorInfo
    biases: TensorInfo
    spec: QuantSpec
    out_features: int
    in_features: int
    experts: int | None


class Checkpoint:
    """An opened checkpoint. Names are canonical: ``embed_tokens``, ``norm``, ``layers.3.self_attn.q_proj``.

    ``tensors`` holds every text tensor by canonical name, ``skipped`` the names of the rest; ``notes`` says in words
    what optional parts are absent, and what that means. ``raw_norms`` is True where RMSNorm weights (layer, final, q
    and k norms; not linear_attn.norm) are stored as w of 1 + w, which the loader must add. Reads are safe from several
    threads at once.
    """

    _finalizer: weakref.finalize[[], Self]

    def __init__(self, path: Path, config: ModelConfig, generation: dict[str, Any] | None, shards: Shards) -> None:
        """Use Checkpoint.open."""
        self.path = path
        self.config = config
        self.notes = (NO_GENERATION_CONFIG,) if generation is None else ()
        self.generation_config = generation = generation or {}
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*config.eos_token_ids, *eos_token_ids(generation))))
        self.skipped = tuple(name for name in shards.tensors if is_skipped(name))
        self.tensors = _text_tensors(shards.tensors)
        self.raw_norms = _check_tensors(self)
        self._modules = quantized_modules(config)
        self._descriptors = shards.descriptors

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens a folder and checks everything but the values of its tensors; raises CheckpointError."""
        path = Path(path)
        _require_folder(path)
        config = ModelConfig.from_file(path / "config.json")
        generation = read_generation_config(path / GENERATION_CONFIG_FILE, config.vocab_size)
        with ExitStack() as stack:
            checkpoint = cls(path, config, generation, open_shards(path, stack))
            checkpoint._finalizer = weakref.finalize(checkpoint, stack.pop_all().close)
        return checkpoint

    def close(self) -> None:
        """Closes the files; repeated calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text_tensor_count(self) -> int:
        """Number of tensors that text generation reads."""
        return len(self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all text tensors as stored; skipped tensors do not count."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def quantized(self, module: str) -> QuantizedInfo:
        """A quantized module by name; KeyError where the model has no such module."""
        name = canonical_name(module)
        *lead, outputs, inputs = self._modules[name]
        return QuantizedInfo(
            weight=self.tensors[f"{name}.weight"],
            scales=self.tensors[f"{name}.scales"],
            biases=self.tensors[f"{name}.biases"],
            spec=self.config.quantization_of(name),
            out_features=outputs,
            in_features=inputs,
            experts=lead[0] if lead else None,
        )

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A new array in the storage type: U32 as uint32, BF16 as its bits in uint16, F16 and F32 as themselves."""
        tensor = self.tensors[canonical_name(name)]
        result = np.empty(tensor.shape, _STORAGE[tensor.dtype])
        self.read_into(name, result)
        return result

    def read_float32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A new float32 array of a BF16, F16 or F32 tensor; exact. TypeError for packed weights."""
        stored = self.read(name)
        dtype = self.tensors[canonical_name(name)].dtype
        if dtype == "U32":
            raise TypeError(f"{name} holds packed integers, not floating point")
        if dtype == "BF16":
            return np.asarray(bf16_to_f32(stored))
        return stored.astype(np.float32, copy=False)

    def read_into(self, name: str, buffer: Any, rows: slice | None = None) -> None:
        """Fills a writable, C-contiguous buffer with a tensor's bytes, or with ``rows`` of its first axis.

        The buffer must have exactly that many bytes (ValueError otherwise). Raises CheckpointError where the file
        has become shorter or cannot be read.
        """
        tensor = self.tensors[canonical_name(name)]
        first, count = _row_range(tensor, rows)
        row_bytes = tensor.nbytes // tensor.shape[0]
        view = _writable_bytes(buffer, count * row_bytes, name)
        if not self._finalizer.alive:
            raise ValueError("the checkpoint is closed")
        _read_exactly(self._descriptors[tensor.path], view, tensor.offset + first * row_bytes, tensor)

    def fingerprint(self) -> str:
        """A hash that tells this model from others: of its config, its files' sizes and times, samples of its tensors.

        A model that was changed in place has another one, though not all of its bytes are read.
        """
        digest = sha256(repr(self.config).encode())
        for path, descriptor in sorted(self._descriptors.items()):
            status = os.fstat(descriptor)
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        for name, tensor in sorted(self.tensors.items()):
            sample = bytearray(min(tensor.nbytes, _SAMPLE_BYTES))
            _read_exactly(self._descriptors[tensor.path], memoryview(sample), tensor.offset, tensor)
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + sample)
        return digest.hexdigest()


def _require_folder(path: Path) -> None:
    try:
        is_folder, is_file = os.path.isdir(path), os.path.isfile(path)
    except ValueError:
        is_folder = is_file = False
    if is_file:
        raise CheckpointError(f"{path}: is a file, expected the folder that holds config.json and *.safetensors")
    if not is_folder:
        raise CheckpointError(f"{show(str(path), 200)}: no such folder; give one that holds config.json")


def _row_range(tensor: TensorInfo, rows: slice | None) -> tuple[int, int]:
    if rows is None:
        return 0, tensor.shape[0]
    first, last, step = rows.indices(tensor.shape[0])
    if step != 1 or (rows.stop is not None and rows.stop > tensor.shape[0]) or last <= first:
        raise ValueError(f"rows {rows} are not a range within the {tensor.shape[0]} of {tensor.name}")
    return first, last - first


def _writable_bytes(buffer: Any, count: int, name: str) -> memoryview:
    view = np.frombuffer(buffer, np.uint8)
    if not view.flags.writeable or view.nbytes != count:
        kind = "writable" if view.flags.writeable else "read-only"
        raise ValueError(f"{name}: buffer has {view.nbytes} {kind} bytes, expected {count} writable ones")
    return view.data


def _read_exactly(descriptor: int, view: memoryview, offset: int, tensor: TensorInfo) -> None:
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{tensor}: cannot be read at byte {offset + done}: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{tensor}: the file ends at byte {offset + done}; it changed while it was open")
        done += count


def _text_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Canonical name -> tensor. All names of a checkpoint have the prefix ``language_model.``, or none has."""
    text = {name: tensor for name, tensor in tensors.items() if not is_skipped(name)}
    prefix = "language_model." if any(name.startswith("language_model.") for name in text) else ""
    result: dict[str, TensorInfo] = {}
    for name, tensor in text.items():
        canonical = canonical_name(name)
        tail = canonical if canonical.startswith("lm_head.") else f"model.{canonical}"
        if name != prefix + tail:
            raise CheckpointError(f"{tensor} is not expected; text tensors here begin with {prefix + 'model.'!r}")
        result[canonical] = tensor
    return result


def _check_tensors(checkpoint: Checkpoint) -> bool:
    """Holds all tensors against the config; returns whether norms are raw."""
    check_overrides(checkpoint.config)
    tensors, expected = checkpoint.tensors, expected_tensors(checkpoint.config)
    for module, shape in quantized_modules(checkpoint.config).items():
        _check_module(module, tensors, checkpoint.config.quantization_of(module), shape[-1])
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]}{more} of {len(expected)} is missing")
    for name, tensor in tensors.items():
        if name not in expected:
            reason = "tie_word_embeddings is true" if name.startswith("lm_head.") else "config.json implies none such"
            raise CheckpointError(f"{tensor} {list(tensor.shape)} is not a tensor of this model: {reason}")
    conv1d = next((name for name, form in expected.items() if form.raw_shape), None)
    raw_norms = conv1d is not None and tensors[conv1d].shape == expected[conv1d].raw_shape
    for name, form in expected.items():
        _check_form(tensors[name], form, raw_norms)
    return raw_norms


def _check_module(module: str, tensors: dict[str, TensorInfo], spec: QuantSpec, inputs: int) -> None:
    """Name the mistakes that a bare difference of shapes would hide: no quantization, other bits, mixed types."""
    weight, scales, biases = (tensors.get(f"{module}.{part}") for part in ("weight", "scales", "biases"))
    if weight and weight.dtype != "U32":
        fix = "Lily runs 4- and 8-bit modules; convert the model with mlx_lm.convert -q"
        raise CheckpointError(f"{weight} is {weight.dtype} {list(weight.shape)}, not quantized (U32): {fix}")
    if weight and scales and weight.shape and scales.shape and weight.shape[:-1] == scales.shape[:-1]:
        words, groups = weight.shape[-1], scales.shape[-1]
        wrong = weight if words != inputs * spec.bits // 32 else scales if groups != inputs // spec.group_size else None
        if wrong:
            seen = f"shapes imply {words * 32 / inputs:g} bits and {groups} groups for {inputs} inputs"
            raise CheckpointError(f"{wrong}: {seen}, expected {spec.bits} bits in groups of {spec.group_size}")
    if scales and biases and scales.dtype in FLOAT_DTYPES and scales.dtype != biases.dtype:
        raise CheckpointError(f"{biases} is {biases.dtype}, expected {scales.dtype} as its scales")


def _check_form(tensor: TensorInfo, form: ExpectedTensor, raw_norms: bool) -> None:
    shape = form.raw_shape if raw_norms and form.raw_shape else form.shape
    if tensor.shape != shape:
        hint = ", as in the first conv1d" if raw_norms and form.raw_shape else ""
        raise CheckpointError(f"{tensor} has shape {show(list(tensor.shape))}, expected {list(shape)}{hint}")
    if tensor.dtype not in form.dtypes:
        raise CheckpointError(f"{tensor} is {tensor.dtype}, expected {' or '.join(form.dtypes)}")
