# SPDX-License-Identifier: Apache-2.0
"""A conversation as a file: its tokens, their KV rows, and the states to which it can go back.

The file is one of safetensors, in this order: ``tokens`` i32 [n], ``kv.LAYER.k`` and ``.v`` bytes [n, row],
``state.POSITION`` bytes [size], and ``digests`` bytes [m, 32], the SHA-256 of the header and of every PIECE bytes of
each tensor before.  So all bytes are covered, and of a long conversation its beginning can be read alone.
``__metadata__`` says which format it is, and what its bits depend on (identity.py): where anything of that differs the
file is of no use.
Not handled: which conversations are worth a file (shelf.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from safetensors import safe_open

from lily.checkpoint.safetensors_file import DTYPE_BYTES, TensorInfo, read_header
from lily.checkpoint.strict_json import open_regular
from lily.device.device import Bytes
from lily.errors import CacheError, CheckpointError, show
from lily.private_files import replacing
from lily.run.sequence import Sequence

FORMAT = {"format": "lily-conversation", "version": "1"}
PIECE = 4 << 20
"""Bytes that are read and checked together."""

Pieces = Generator[None, None, None]
"""Reads a file, and stops after every piece; closing it ends that."""

_DIGEST = 32  # bytes
_IDENTITY = "identity"
_STATE = "state."
_STATE_NAME = re.compile(r"state\.([1-9]\d{0,8})", re.ASCII)


@dataclass(frozen=True, eq=False)
class Saved:
    """A file whose header was checked. ``points``: positions whose states it holds."""

    path: Path
    tokens: list[int]
    points: tuple[int, ...]
    nbytes: int

    @property
    def latest(self) -> int:
        """The last position to which it can go back."""
        return max(self.points)

    def point(self, limit: int) -> int:
        """The last position that is at most ``limit``; 0 if there is none."""
        return max((point for point in self.points if point <= limit), default=0)


def save(path: Path, identity: Mapping[str, str], sequence: Sequence, *, in_use: bool = False) -> Saved:
    """Writes ``sequence``, which has states, as far as its last one. OSError: it cannot be written; nothing is changed.

    ``in_use``: as in ``Sequence.states``.
    """
    states = sequence.states(in_use=in_use)
    parts = _parts(sequence, states)
    header = _header(parts, identity)
    digests = [sha256(header).digest()]
    with replacing(path) as file:
        file.write(header)
        for part in parts.values():
            for start in range(0, part.nbytes, PIECE):
                piece = part.read(start, min(PIECE, part.nbytes - start)).data
                digests.append(sha256(piece).digest())
                file.write(piece)
        file.write(b"".join(digests))
        nbytes = file.tell()
    return Saved(path, sequence.tokens[: max(states)], tuple(sorted(states)), nbytes)


def file_bytes(identity: Mapping[str, str], sequence: Sequence) -> int:
    """Of the file that ``save`` would make of ``sequence``, which has states and is not in use."""
    parts = _parts(sequence, dict.fromkeys(sequence.positions()))
    data = sum(part.nbytes for part in parts.values())
    return len(_header(parts, identity)) + data + _digest_count(parts) * _DIGEST


def read(path: Path, identity: Mapping[str, str], *, vocab: int) -> Saved:
    """A file of ``save``: its header and its tokens. CacheError: it is none, damaged, or of another identity."""
    with _opened(path, identity) as file:
        tokens = file.all("tokens").view(np.int32).tolist()
        points = sorted(int(found[1]) for found in map(_STATE_NAME.fullmatch, file.tensors) if found)
        if not points or len(tokens) != points[-1] or min(tokens) < 0 or max(tokens) >= vocab:
            _damaged(path, "its tokens or positions are not those of a conversation")
        return Saved(path, tokens, tuple(points), file.nbytes)


def restore(saved: Saved, identity: Mapping[str, str], sequence: Sequence, position: int) -> Pieces:
    """Makes ``sequence`` hold what was saved up to the point ``position``; stops after every piece.

    Its KV cache holds so many tokens already. CacheError: the file is gone or damaged. The sequence is empty then, and
    if this is not resumed to its end.
    """
    sequence.reset()
    done = False
    try:
        with _opened(saved.path, identity) as file:
            for name, buffer in sequence.kv.items():
                yield from file.pieces(name, position * sequence.kv_row_bytes, buffer.write)
            states = {point: np.empty(sequence.state_bytes, np.uint8) for point in saved.points if point <= position}
            for point, state in states.items():
                yield from file.pieces(f"{_STATE}{point}", state.size, _into(state))
        sequence.adopt(saved.tokens[:position], states)
        done = True
    finally:
        if not done:
            sequence.reset()


class _Part(NamedTuple):
    """A tensor of the file; ``read`` gives so many of its bytes from some one on."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Bytes]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def _parts(sequence: Sequence, states: Mapping[int, Bytes | None]) -> dict[str, _Part]:
    """In the order of the file."""
    length = max(states)
    tokens = np.array(sequence.tokens[:length], np.int32).view(np.uint8)
    return {
        "tokens": _Part("I32", (length,), _of(tokens)),
        **{name: _Part("U8", (length, sequence.kv_row_bytes), buffer.read) for name, buffer in sequence.kv.items()},
        **{f"{_STATE}{at}": _Part("U8", (sequence.state_bytes,), _of(states[at])) for at in sorted(states)},
    }


def _of(data: Bytes | None) -> Callable[[int, int], Bytes]:
    return lambda start, count: data[start : start + count]  # type: ignore[index]  # who reads has data


def _into(target: Bytes) -> Callable[[Bytes, int], None]:
    def put(data: Bytes, start: int) -> None:
        target[start : start + data.size] = data

    return put


def _header(parts: Mapping[str, _Part], identity: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file: bytes of the JSON text, and the text."""
    entries: dict[str, Any] = {"__metadata__": {**FORMAT, _IDENTITY: json.dumps(dict(identity))}}
    at = 0
    shapes = {name: (part.dtype, part.shape) for name, part in parts.items()}
    for name, (dtype, shape) in (shapes | {"digests": ("U8", (_digest_count(parts), _DIGEST))}).items():
        end = at + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _digest_count(parts: Mapping[str, _Part]) -> int:
    return 1 + sum(_pieces(part.nbytes) for part in parts.values())


def _pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE)


class _File:
    """An open file whose header is sound and of the right identity."""

    def __init__(self, path: Path, descriptor: int, tensors: dict[str, TensorInfo], nbytes: int) -> None:
        self.path, self.tensors, self.nbytes = path, tensors, nbytes
        self._descriptor = descriptor
        self._first: dict[str, int] = {}  # digest of a tensor's first piece
        count = 1
        for name, tensor in tensors.items():
            self._first[name] = count
            count += _pieces(tensor.nbytes)
        found = tensors.get("digests")
        if found is None or list(tensors)[-1] != "digests" or found.shape != (self._first["digests"], _DIGEST):
            _damaged(path, "it has no digests of what it holds")
        self._digests = self._bytes(found.offset, found.nbytes)
        if not self._agrees(0, self._bytes(0, next(iter(tensors.values())).offset)):
            _damaged(path, "its header is not the one that was written")

    def all(self, name: str) -> Bytes:
        """A whole tensor."""
        tensor = self.tensors.get(name)
        data = np.empty(0 if tensor is None else tensor.nbytes, np.uint8)
        for _ in self.pieces(name, data.size, _into(data)):
            pass
        return data

    def pieces(self, name: str, nbytes: int, put: Callable[[Bytes, int], object]) -> Iterator[None]:
        """Gives the first ``nbytes`` of a tensor to ``put``, each piece with its place, and stops after each."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.nbytes < nbytes:
            _damaged(self.path, f"it has no {name} of that size")
        for number, start in enumerate(range(0, nbytes, PIECE)):
            data = self._bytes(tensor.offset + start, min(PIECE, tensor.nbytes - start))
            if not self._agrees(self._first[name] + number, data):
                _damaged(self.path, f"{name} is not what was written")
            put(np.frombuffer(data, np.uint8, min(PIECE, nbytes - start)), start)
            yield

    def _agrees(self, number: int, data: bytes) -> bool:
        return sha256(data).digest() == self._digests[number * _DIGEST : (number + 1) * _DIGEST]

    def _bytes(self, offset: int, count: int) -> bytes:
        try:
            data = os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise CacheError(f"{self.path}: cannot be read: {error.strerror}") from None
        if len(data) != count:
            _damaged(self.path, f"it ends at byte {offset + len(data)}")
        return data


@contextmanager
def _opened(path: Path, identity: Mapping[str, str]) -> Iterator[_File]:
    if not os.path.lexists(path):
        raise CacheError(f"{path}: there is no such file; save a conversation first")
    try:
        descriptor, size = open_regular(path)
        with closing(os.fdopen(descriptor, "rb")):
            tensors = {tensor.name: tensor for tensor in read_header(descriptor, size, path)}
            _check_identity(path, identity)
            yield _File(path, descriptor, tensors, size)
    except CheckpointError as error:  # of a checkpoint it would have to be downloaded again
        reason = str(error).removeprefix(f"{path}: ").rsplit(";", 1)[0]
        _damaged(path, reason)


def _check_identity(path: Path, identity: Mapping[str, str]) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT["format"]:
        raise CacheError(f"{path}: is no conversation that Lily has saved; name another file")
    try:
        seen = json.loads(metadata.get(_IDENTITY, "null"))
    except ValueError:
        seen = None
    if metadata.get("version") != FORMAT["version"] or not isinstance(seen, dict):
        _foreign(path, f"format (version {show(metadata.get('version'))})")
    for name, value in identity.items():
        if seen.get(name) != value:
            _foreign(path, name)
    if seen.keys() != identity.keys():
        _foreign(path, "version of Lily")


def _foreign(path: Path, what: str) -> NoReturn:
    raise CacheError(
        f"{path}: was saved with another {what}, so its states would not give the same replies here; it was left as it "
        "is: remove it, or name another file"
    )


def _damaged(path: Path, what: str) -> NoReturn:
    raise CacheError(f"{path}: is damaged: {what}; it was left as it is: remove it, or name another file")
