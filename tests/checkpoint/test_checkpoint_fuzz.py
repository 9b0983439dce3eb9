# SPDX-License-Identifier: Apache-2.0
"""Mutated checkpoints: each must end in a CheckpointError that names a file, whatever byte or number was changed.

Mutations are drawn from a seed, so a failure repeats. All are such that no reader may accept the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, Draft, header_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.safetensors_file import open_shards
from lily.errors import CheckpointError

COUNT = 300
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class File:
    """A safetensors file as its head (length and header), which is edited, and the size of its data."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = file.read(8)
            self.head = length + file.read(struct.unpack("<Q", length)[0])
        self.size = path.stat().st_size

    @property
    def header(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.head[8:])
        return result

    def replace(self, header: object) -> None:
        """Another header in front of the same data."""
        data = self.size - len(self.head)
        self.head = header_bytes(header)
        self.size = len(self.head) + data

    def write(self, path: Path) -> None:
        path.write_bytes(self.head)
        os.truncate(path, self.size)


Mutation = Callable[[random.Random, File], None]


def flip_byte(rng: random.Random, file: File) -> None:
    begin = file.head.index(b"}") + 1  # after __metadata__, whose strings may be anything
    at = rng.randrange(begin, len(file.head))
    file.head = (
        file.head[:at] + bytes([rng.choice([b for b in range(256) if b != file.head[at]])]) + file.head[at + 1 :]
    )


def delete_bytes(rng: random.Random, file: File) -> None:
    at = rng.randrange(file.head.index(b"}") + 1, len(file.head) - 40)
    file.head = file.head[:at] + file.head[at + rng.randint(1, 40) :]


def wrong_length(rng: random.Random, file: File) -> None:
    length = len(file.head) - 8
    choices = [0, 1, 2, length - 1, length + 1, file.size - 8, file.size, 1 << 31, 1 << 63, (1 << 64) - 1]
    value = rng.choice([*choices, rng.randrange(length), rng.getrandbits(64)])
    file.head = struct.pack("<Q", value) + file.head[8:]


def cut(rng: random.Random, file: File) -> None:
    file.size = rng.choice([0, 7, 8, len(file.head), file.size - 1, rng.randrange(file.size)])
    file.head = file.head[: file.size]


def extend(rng: random.Random, file: File) -> None:
    file.size += rng.choice([1, 2, 7, 4096, rng.randrange(1, 1 << 32)])


def bad_offset(rng: random.Random, file: File) -> None:
    header = file.header
    entry = _some_entry(rng, header)
    begin, end = entry["data_offsets"]
    size = end - begin
    entry["data_offsets"] = rng.choice(
        [
            [begin + 1, end + 1],
            [begin - 1, end - 1],
            [begin + size, end + size],
            [-size, 0],
            [end, begin],
            [begin, end + 1],
            [float(begin), end],
            [begin, end, end],
            [begin],
            [],
            end,
            None,
            [str(begin), str(end)],
            [begin, True],
            [begin + (1 << 64), end + (1 << 64)],
            [10**300, 10**300 + size],
            [[begin], [end]],
            {"begin": begin, "end": end},
            [begin, float("nan")],
            [begin, float("inf")],
        ]
    )
    file.replace(header)


def bad_shape(rng: random.Random, file: File) -> None:
    header = file.header
    entry = _some_entry(rng, header)
    shape = entry["shape"]
    entry["shape"] = rng.choice(
        [
            [*shape, 2],
            [*shape[:-1], shape[-1] + 1],
            [*shape[:-1], -shape[-1]],
            [*shape[:-1], float(shape[-1])],
            [*shape[:-1], None],
            [*shape, 1, 1, 1, 1, 1, 1, 1, 1],
            [*shape[:-1], shape[-1] << 64],
            [1 << 62, 1 << 62, 1 << 62, 1 << 62, 0, shape[-1]],
            shape[-1],
            {},
            "[2]",
            [[size] for size in shape],
        ]
    )
    file.replace(header)


def same_size_other_shape(rng: random.Random, file: File) -> None:
    header = file.header
    entry = _some_entry(rng, header, text=True)
    shape = entry["shape"]
    entry["shape"] = rng.choice([[*shape, 1], [1, *shape], [2 * shape[0], *shape[1:-1], shape[-1] / 2], [*shape, 0]])
    file.replace(header)


def bad_dtype(rng: random.Random, file: File) -> None:
    header = file.header
    entry = _some_entry(rng, header, text=True)
    same_size = {"U32": ["F32", "I32"], "BF16": ["U16", "I16"]}[entry["dtype"]]
    entry["dtype"] = rng.choice([*same_size, "F64", "U8", "bf16", "", "F4", None, 2, ["BF16"], "BF16\0"])
    file.replace(header)


def bad_entry(rng: random.Random, file: File) -> None:
    header = file.header
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    key = rng.choice(["dtype", "shape", "data_offsets"])
    without = {other: value for other, value in header[name].items() if other != key}
    deep: Any = 0
    for _ in range(rng.choice([3, 900])):
        deep = [deep]
    header[name] = rng.choice(
        [without, {**header[name], "extra": 1}, None, [], "x", 7, {}, {**header[name], key: deep}]
    )
    file.replace(header)


def swap_offsets_of_two(rng: random.Random, file: File) -> None:
    header = file.header
    sizes: dict[int, str] = {}
    names = sorted(set(header) - {"__metadata__"})
    rng.shuffle(names)
    for name in names:
        begin, end = header[name]["data_offsets"]
        sizes.setdefault(end - begin, name)
    first, second = rng.sample(sorted(sizes.values()), 2)
    header[first]["data_offsets"], header[second]["data_offsets"] = (
        header[second]["data_offsets"],
        header[first]["data_offsets"],
    )
    file.replace(header)


def share_data(rng: random.Random, file: File) -> None:
    """Two tensors of one size on the same bytes, and nothing on the others'."""
    header = file.header
    by_size: dict[int, list[str]] = {}
    for name in sorted(set(header) - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        by_size.setdefault(end - begin, []).append(name)
    first, second = rng.sample(rng.choice([names for names in by_size.values() if len(names) > 1]), 2)
    header[first]["data_offsets"] = header[second]["data_offsets"]
    file.replace(header)


def bad_name(rng: random.Random, file: File) -> None:
    header = file.header
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    entry = header.pop(name)
    new = rng.choice(
        [
            None,
            "",
            name + "x",
            name[:-1],
            name.upper(),
            name + "\0",
            "\ud800" + name,
            "../" + name,
            "x" * 100_000,
            "mtp." + name,
            "language_model." + name,
            rng.choice(sorted(set(header) - {"__metadata__"})),
        ]
    )
    if new is not None:
        header[new] = entry
    file.replace(header)


def bad_metadata(rng: random.Random, file: File) -> None:
    header = file.header
    header["__metadata__"] = rng.choice([None, [], "mlx", {"format": 1}, {"format": {"a": "b"}}, {"format": None}])
    file.replace(header)


def not_an_object(rng: random.Random, file: File) -> None:
    header = file.header
    file.replace(rng.choice([[header], [], 0, None, "x", {}, {"__metadata__": header["__metadata__"]}]))


def not_utf8(rng: random.Random, file: File) -> None:
    text = file.head[8:].decode()
    data = rng.choice([text.encode("utf-16"), text.encode("utf-8-sig"), text.encode() + b"\0", b"\x80" + text.encode()])
    file.size += len(data) - len(text)
    file.head = struct.pack("<Q", len(data)) + data


def _some_entry(rng: random.Random, header: dict[str, Any], text: bool = False) -> dict[str, Any]:
    names = [name for name in sorted(header) if name.startswith("language_model." if text else ("l", "v"))]
    entry: dict[str, Any] = header[rng.choice(names)]
    return entry


SHARD_MUTATIONS: list[Mutation] = [
    flip_byte,
    flip_byte,
    flip_byte,
    flip_byte,
    delete_bytes,
    wrong_length,
    cut,
    extend,
    bad_offset,
    bad_offset,
    bad_shape,
    same_size_other_shape,
    bad_dtype,
    bad_entry,
    swap_offsets_of_two,
    share_data,
    bad_name,
    bad_metadata,
    not_an_object,
    not_utf8,
]


def flip_index_byte(rng: random.Random, data: bytes) -> bytes:
    begin = data.index(b'"weight_map"')
    at = rng.choice([i for i in range(begin, len(data)) if not data[i : i + 1].isspace()])
    return data[:at] + bytes([rng.choice([b for b in range(256) if b != data[at]])]) + data[at + 1 :]


def cut_index(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def edit_index(rng: random.Random, data: bytes) -> bytes:
    index = json.loads(data)
    weight_map = index["weight_map"]
    name = rng.choice(sorted(weight_map))
    match rng.randrange(5):
        case 0:
            del weight_map[name]
        case 1:
            weight_map[name] = SHARDS[1 - SHARDS.index(weight_map[name])]
        case 2:
            weight_map[name + ".extra"] = weight_map[name]
        case 3:
            weight_map[name] = rng.choice(["..", "", "/", 1, None, True, [SHARDS[0]], "\0.safetensors", "config.json"])
        case 4:
            index["weight_map"] = rng.choice([None, [], {}, "x", 5, [[name, weight_map[name]]]])
    return json.dumps(index).encode()


INDEX_MUTATIONS = [flip_index_byte, cut_index, edit_index]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Draft.load(DATA / "random-tiny-vl", values=False).write(tmp_path_factory.mktemp("sound"))


def variant(sound: Path, folder: Path, name: str) -> Path:
    """The sound checkpoint by links, but for the one file to be written."""
    for path in sound.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    return folder / name


def test_unchanged_files_are_accepted(sound: Path, tmp_path: Path) -> None:
    File(sound / SHARDS[0]).write(variant(sound, tmp_path, SHARDS[0]))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert (checkpoint.text_tensor_count, len(checkpoint.skipped)) == (182, 21)


@pytest.mark.parametrize("seed", range(COUNT))
def test_mutated_checkpoints_are_refused_by_name(sound: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    if seed % 6 == 5:
        data = (sound / INDEX).read_bytes()
        mutated = INDEX_MUTATIONS[seed // 6 % len(INDEX_MUTATIONS)](rng, data)
        assert mutated != data
        variant(sound, tmp_path, INDEX).write_bytes(mutated)
    else:
        shard = rng.choice(SHARDS)
        file = File(sound / shard)
        before = (file.head, file.size)
        SHARD_MUTATIONS[seed % len(SHARD_MUTATIONS)](rng, file)
        assert (file.head, file.size) != before
        file.write(variant(sound, tmp_path, shard))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert len(message) < 600 + 2 * len(str(tmp_path))
    assert message.isprintable()


def test_every_kind_of_mutation_is_reached() -> None:
    reached = {SHARD_MUTATIONS[seed % len(SHARD_MUTATIONS)] for seed in range(COUNT) if seed % 6 != 5}
    assert reached == set(SHARD_MUTATIONS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U32", "BF16", "F32"]) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.binary(max_size=64) | st.dictionaries(st.text(max_size=4), entries | json_values, max_size=3).map(header_bytes)
)
def test_arbitrary_headers_never_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, head: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "model.safetensors").write_bytes(head + bytes(12))
    with ExitStack() as stack:
        try:
            shards = open_shards(folder, stack)
        except CheckpointError:
            return
        covered = sum(tensor.nbytes for tensor in shards.tensors.values())
        assert 8 + struct.unpack("<Q", head[:8])[0] + covered == len(head) + 12


@pytest.mark.parametrize("seed", range(60))
def test_flipped_config_bytes_never_fail_otherwise(sound: Path, tmp_path: Path, seed: int) -> None:
    """A digit may change into another sound one, so acceptance is allowed here; other exceptions are not."""
    rng = random.Random(seed)
    data = bytearray((sound / "config.json").read_bytes())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.randrange(32, 127)
    variant(sound, tmp_path, "config.json").write_bytes(bytes(data))
    with contextlib.suppress(CheckpointError):
        Checkpoint.open(tmp_path).close()
