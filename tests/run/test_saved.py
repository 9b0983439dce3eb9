# SPDX-License-Identifier: Apache-2.0
"""A conversation in a file: what is read is what was written, or it is refused; a file is whole at any time.

Not handled: whether a restored conversation goes on as it would have (test_engine_saved.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from paths import EMBEDDED
from stored_sequences import StoredSequence

from lily import private_files
from lily.errors import CacheError
from lily.private_files import check_private, make_private, remove_parts, replacing
from lily.run import saved as saved_module
from lily.run.saved import Saved, file_bytes, read, restore, save

IDENTITY = {"model": "m", "device": "cpu", "build of Lily": "1"}
TOKENS = [n * 37 % 900 for n in range(50)]
POINTS = (16, 48)
VOCAB = 1000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved conversation, in several pieces of each tensor."""
    monkeypatch.setattr(saved_module, "PIECE", 256)
    path = tmp_path / "a.safetensors"
    written(path)
    return path


def written(path: Path, tokens: list[int] = TOKENS, identity: dict[str, str] = IDENTITY) -> Saved:
    return save(path, identity, StoredSequence.of(tokens, POINTS))  # type: ignore[arg-type]


def restored(saved: Saved, position: int) -> StoredSequence:
    sequence = StoredSequence.of([9] * 20, [10])  # what it held before
    for _ in restore(saved, IDENTITY, sequence, position):  # type: ignore[arg-type]
        pass
    return sequence


def load(path: Path, position: int = POINTS[-1], identity: dict[str, str] = IDENTITY) -> StoredSequence:
    return restored(read(path, identity, vocab=VOCAB), position)


@pytest.mark.parametrize("position", POINTS)
def test_what_is_read_is_what_was_written(file: Path, position: int) -> None:
    saved, original = read(file, IDENTITY, vocab=VOCAB), StoredSequence.of(TOKENS, POINTS)
    assert (saved.tokens, saved.points, saved.latest) == (TOKENS[:48], POINTS, 48)
    assert saved.nbytes == file.stat().st_size == file_bytes(IDENTITY, original)  # type: ignore[arg-type]
    got = restored(saved, position)
    assert got.tokens == TOKENS[:position]
    assert sorted(got.points) == [point for point in POINTS if point <= position]
    assert all(np.array_equal(got.points[point], original.points[point]) for point in got.points)
    assert np.array_equal(got.slot, original.points[position])
    used = position * got.kv_row_bytes
    assert all(np.array_equal(got.kv[name].read(0, used), rows.read(0, used)) for name, rows in original.kv.items())


def test_only_its_user_can_read_it(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_it_is_an_ordinary_file_of_safetensors(file: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(file)
    assert tensors["tokens"].tolist() == TOKENS[:48]
    assert list(tensors["state.16"]) == list(StoredSequence.of(TOKENS, POINTS).points[16])


def test_a_damaged_byte_anywhere_is_refused(file: Path) -> None:
    """The tokens are checked when the file is opened, all else when it is read."""
    whole = file.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0] + 8
    places = [*range(0, header, 7), *range(header, len(whole), 61), len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(CacheError, match=r"^.*a\.safetensors: "):
            load(file)
        assert file.read_bytes() == damaged, "it was changed"
    file.write_bytes(whole)
    load(file)


def test_a_shorter_or_longer_file_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in [*range(0, len(whole), 173), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CacheError, match="damaged"):
            load(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CacheError, match="damaged"):
        load(file)


def test_damage_leaves_the_sequence_empty(file: Path) -> None:
    saved = read(file, IDENTITY, vocab=VOCAB)
    data = bytearray(file.read_bytes())
    data[-300] ^= 1  # in the last state
    file.write_bytes(data)
    sequence = StoredSequence.of([9] * 20, [10])
    with pytest.raises(CacheError, match="is not what was written"):
        list(restore(saved, IDENTITY, sequence, 48))  # type: ignore[arg-type]
    assert (sequence.tokens, sequence.points) == ([], {})


def test_a_restore_that_is_not_gone_on_with_leaves_the_sequence_empty(file: Path) -> None:
    sequence = StoredSequence.of([9] * 20, [10])
    pieces = restore(read(file, IDENTITY, vocab=VOCAB), IDENTITY, sequence, 48)  # type: ignore[arg-type]
    next(pieces)
    pieces.close()
    assert (sequence.tokens, sequence.points) == ([], {})


@pytest.mark.parametrize("name", list(IDENTITY))
def test_another_identity_is_refused_by_its_name(file: Path, name: str) -> None:
    with pytest.raises(CacheError, match=f"another {name}.*left as it is"):
        load(file, identity={**IDENTITY, name: "other"})
    assert load(file).tokens


def test_a_file_of_another_format_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CacheError, match="no conversation that Lily has saved"):
        load(EMBEDDED / "model.safetensors")
    with pytest.raises(CacheError, match="no such file"):
        load(file.with_name("missing"))
    with pytest.raises(CacheError, match="not a regular file"):
        load(file.parent)
    monkeypatch.setattr(saved_module, "FORMAT", {**saved_module.FORMAT, "version": "2"})
    with pytest.raises(CacheError, match=r"another format \(version '1'\)"):
        load(file)


def test_tokens_that_no_vocabulary_has_are_refused(tmp_path: Path) -> None:
    """A file that somebody else has made, with digests that agree."""
    for tokens in ([-1] * 50, [VOCAB] * 50):
        written(tmp_path / "b", tokens)
        with pytest.raises(CacheError, match="not those of a conversation"):
            load(tmp_path / "b")


class Failing:
    """A file that is full after ``room`` bytes."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


@pytest.mark.parametrize("room", [0, 1000, 3000])
def test_a_full_disk_leaves_the_old_file(file: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    @contextmanager
    def full(target: Path) -> Iterator[Any]:
        with replacing(target) as opened:
            yield Failing(opened, room)

    monkeypatch.setattr(saved_module, "replacing", full)
    with pytest.raises(OSError, match="No space left"):
        written(file, TOKENS[::-1])
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


_WRITER = """
import sys
from pathlib import Path
from stored_sequences import StoredSequence
from lily.run.saved import save
sequences = [StoredSequence.of([number] * 3000, [3000]) for number in range(4)]
print("begun", flush=True)
while True:
    for sequence in sequences:
        save(Path(sys.argv[1]), {"model": "m"}, sequence)
"""


def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    """At whatever byte it was; what it leaves besides is removed."""
    path, draw = tmp_path / "c", random.Random(5)
    support = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])}
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], env=environment, stdout=subprocess.PIPE
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            inode = path.stat().st_ino if path.exists() else 0
            changes = draw.randrange(1, 6)
            while changes:
                now = path.stat().st_ino if path.exists() else inode
                changes -= now != inode
                inode = now
            process.send_signal(signal.SIGKILL)
        saved = read(path, {"model": "m"}, vocab=VOCAB)
        sequence = StoredSequence()
        list(restore(saved, {"model": "m"}, sequence, 3000))  # type: ignore[arg-type]
        original = StoredSequence.of(saved.tokens, [3000])
        assert np.array_equal(sequence.kv["kv.3.v"].bytes, original.kv["kv.3.v"].bytes)
    remove_parts(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == ["c"]


# ---- private files
def test_parts_of_processes_that_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.part").touch()  # not ours
    (tmp_path / f"x.{2**22 + 1}.abc.part").touch()  # above the largest process number of Linux and macOS
    with replacing(tmp_path / "x") as file:
        file.write(b"1")
        remove_parts(tmp_path)
        assert len(list(tmp_path.glob("x.*.part"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.part", "x"]


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    with pytest.raises(PermissionError, match=r"open to other users \(chmod 700"):
        check_private(tmp_path / "open")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(tmp_path / "a")
    monkeypatch.setattr(private_files.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="open to other users"):
        make_private(tmp_path / "a")


def test_the_header_is_json_that_says_what_it_is(file: Path) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert (metadata["format"], metadata["version"]) == ("lily-conversation", "1")
    assert json.loads(metadata["identity"]) == IDENTITY
