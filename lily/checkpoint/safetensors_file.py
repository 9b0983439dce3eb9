# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: headers of one file, and the set of shards that an index ties together.

Headers are read by the ``safetensors`` library, and held before that against more than it asks: no name or key given
twice, nothing beside dtype, shape and offsets, bounded sizes, and a message that says which tensor is at fault. Every
byte of a data section belongs to exactly one tensor, or the file is refused. The library tells the order of the
tensors but not their offsets, so these are summed up here; the data is read elsewhere, straight into the memory of the
device. Data may begin at any byte: MLX does not pad headers. Not handled: types of less than a byte per element.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lily.checkpoint.library_errors import pass_on_unless_of_library
from lily.checkpoint.strict_json import MAX_JSON_BYTES, open_regular, parse_object, read_object
from lily.errors import CheckpointError, show

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_RANK = 8
_MAX_BYTES = 1 << 62  # offsets stay within the signed 64 bits of pread
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. ``name`` is the one in the file; ``offset`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path}: tensor {show(self.name)}"


@dataclass(frozen=True)
class Shards:
    """All tensors of a checkpoint by the names in its files, and an open descriptor for each file."""

    tensors: dict[str, TensorInfo]
    descriptors: dict[Path, int]


def open_shards(folder: Path, stack: ExitStack) -> Shards:
    """Opens the checkpoint's files and checks every header and the index; descriptors are closed by ``stack``."""
    weight_map = read_weight_map(folder)
    names = sorted(set(weight_map.values())) if weight_map is not None else [_single_file(folder)]
    _refuse_strays(folder, names)
    tensors: dict[str, TensorInfo] = {}
    descriptors: dict[Path, int] = {}
    for name in names:
        path = folder / name
        descriptor, size = open_regular(path)
        stack.callback(os.close, descriptor)
        descriptors[path] = descriptor
        for tensor in read_header(descriptor, size, path):
            if tensor.name in tensors:
                raise CheckpointError(f"{tensor} is also in {tensors[tensor.name].path.name}; expected it in one file")
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _compare_with_index(tensors, weight_map, folder / INDEX_NAME)
    return Shards(tensors, descriptors)


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, from the index; None where there is no index."""
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        return None
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {show(weight_map)}, expected an object of tensor: file name")
    for tensor, shard in weight_map.items():
        if type(shard) is not str or not _SHARD_NAME.fullmatch(shard):
            allowed = "the name of a .safetensors file in the same folder"
            raise CheckpointError(f"{path}: weight_map[{show(tensor)}] is {show(shard)}, expected {allowed}")
    return weight_map


def read_header(descriptor: int, size: int, path: Path) -> list[TensorInfo]:
    """Checks one file's header and reads it; returns its tensors in order of their data."""
    begin, declared = _declared(descriptor, size, path)
    tensors = _read_by_library(path, begin)
    if tensors != declared:
        raise CheckpointError(f"{path}: changed while it was opened; try again when it is written")
    return tensors


def _read_by_library(path: Path, begin: int) -> list[TensorInfo]:
    """The tensors of a file whose data section starts at byte ``begin``."""
    tensors = []
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.offset_keys():
                entry = file.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                nbytes = DTYPE_BYTES[dtype] * math.prod(shape)
                tensors.append(TensorInfo(name, dtype, shape, path, begin, nbytes))
                begin += nbytes  # the library has made sure that data lies without holes, in the order of these names
    except BaseException as error:
        pass_on_unless_of_library(error)
        raise CheckpointError(f"{path}: not valid safetensors: {str(error)[:200]}; download it again") from None
    return tensors


def _declared(descriptor: int, size: int, path: Path) -> tuple[int, list[TensorInfo]]:
    """Where the data section starts and what the header says of it, once all is checked that Lily asks of a header."""
    if size == 0:
        raise CheckpointError(f"{path}: is empty; download it again")
    header = _read_bytes(descriptor, 8, 0, path)
    (length,) = struct.unpack("<Q", header)
    if not 2 <= length <= min(MAX_JSON_BYTES, size - 8):
        allowed = f"2 to {MAX_JSON_BYTES} and within the file's {size} bytes"
        raise CheckpointError(f"{path}: header length is {length}, expected {allowed}; not safetensors, or truncated")
    entries = parse_object(_read_bytes(descriptor, length, 8, path), f"{path}: header")
    _check_metadata(entries.pop("__metadata__", None), path)
    begin = 8 + length
    tensors = [_tensor_info(name, entry, path, begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_layout(tensors, begin, size, path)
    return begin, tensors


def _read_bytes(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    data = b""
    try:
        while len(data) < count:
            piece = os.pread(descriptor, count - len(data), offset + len(data))
            if not piece:
                raise CheckpointError(f"{path}: ends at byte {offset + len(data)} inside the header; download it again")
            data += piece
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return data


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:  # absent or null
        return
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {show(metadata)}, expected an object of strings")


def _fault(path: Path, name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {show(name)}: {fault}")


def _tensor_info(name: str, entry: Any, path: Path, data_begin: int) -> TensorInfo:
    if not name.isprintable() and any("\ud800" <= character <= "\udfff" for character in name):
        raise _fault(path, name, "the name has a lone surrogate, expected Unicode text")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _fault(path, name, f"entry is {show(entry)}, expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        raise _fault(path, name, f"dtype is {show(dtype)}, expected one of {', '.join(DTYPE_BYTES)}")
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        raise _fault(path, name, f"shape is {show(shape)}, expected up to {_MAX_RANK} non-negative integers")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _fault(path, name, f"data_offsets are {show(offsets)}, expected [begin, end] with begin <= end")
    nbytes = DTYPE_BYTES[dtype]
    for extent in shape:
        nbytes *= extent
    if nbytes != offsets[1] - offsets[0]:
        seen = f"data_offsets hold {offsets[1] - offsets[0]} bytes"
        raise _fault(path, name, f"{seen}, expected {nbytes} for {dtype} {show(shape)}")
    return TensorInfo(name, dtype, tuple(shape), path, data_begin + offsets[0], nbytes)


def _is_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_BYTES for value in values)


def _check_layout(tensors: list[TensorInfo], begin: int, size: int, path: Path) -> None:
    end = begin
    previous = "the header"
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise CheckpointError(f"{tensor} at byte {tensor.offset} {fault} {previous}, which ends at byte {end}")
        end = tensor.offset + tensor.nbytes
        previous = show(tensor.name)
    if end > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes, its header needs {end}; download it again")
    if end < size:
        raise CheckpointError(f"{path}: {size - end} bytes follow the last tensor, expected none; download it again")


def _single_file(folder: Path) -> str:
    if os.path.lexists(folder / SINGLE_NAME):
        return SINGLE_NAME
    found = [path.name for path in _model_files(folder)]
    if found:
        raise CheckpointError(f"{folder / INDEX_NAME}: is missing, beside {len(found)} shards; download it again")
    raise CheckpointError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}: not a checkpoint, or not downloaded yet")


def _model_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _refuse_strays(folder: Path, names: Iterable[str]) -> None:
    strays = {path.name for path in _model_files(folder)} - set(names)
    if strays:
        used = f"the index {INDEX_NAME}" if os.path.lexists(folder / INDEX_NAME) else SINGLE_NAME
        shown = show(min(strays))
        raise CheckpointError(f"{folder}: {shown} does not belong to {used}; remove it, or download the index again")


def _compare_with_index(tensors: dict[str, TensorInfo], weight_map: dict[str, str], index: Path) -> None:
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor} is not in {index.name}; the two are of different versions")
        if weight_map[name] != tensor.path.name:
            raise CheckpointError(f"{index}: weight_map[{show(name)}] is {weight_map[name]!r}, but {tensor} holds it")
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: weight_map[{show(name)}] names {shard!r}, which does not hold this tensor")
