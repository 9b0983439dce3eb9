# SPDX-License-Identifier: Apache-2.0
"""JSON from files that may be damaged or hostile, and how their values are shown in messages.

Accepts less than the json module: UTF-8 only, no byte order mark, no NaN or Infinity, no duplicate keys, bounded size.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from lily.errors import CheckpointError, show

MAX_JSON_BYTES = 16 << 20
"""Bound for config, index and shard headers; the 35B model's largest is 216 KB."""


# Python's own limit is higher in newer versions for parsing than for comparing and printing what was parsed.
_MAX_DEPTH = 32


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """Parses one JSON object; raises CheckpointError that begins with source."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
        if _depth_exceeds(value, _MAX_DEPTH):
            raise RecursionError
    except RecursionError:
        raise CheckpointError(f"{source}: JSON is nested too deeply, expected at most {_MAX_DEPTH} levels") from None
    except ValueError as error:  # covers UnicodeDecodeError, JSONDecodeError and over-long integers
        raise CheckpointError(f"{source}: not valid UTF-8 JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds {show(value)}, expected a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Reads and parses a file that holds one JSON object of at most MAX_JSON_BYTES."""
    data = read_bytes(path, MAX_JSON_BYTES)
    if not data:
        raise CheckpointError(f"{path}: is empty; download it again")
    return parse_object(data, str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a regular file of at most ``limit`` bytes; raises CheckpointError."""
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {limit}")
        try:
            return file.read(limit)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def open_regular(path: Path) -> tuple[int, int]:
    """Opens a regular file for reading; returns descriptor and size. A FIFO is refused rather than waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        kind = "is a link to a missing file" if os.path.islink(path) else "is missing"
        raise CheckpointError(f"{path}: {kind}; download the checkpoint again") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a regular file")
    return descriptor, info.st_size


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return True


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {show(key)}")
            seen.add(key)
    return result
