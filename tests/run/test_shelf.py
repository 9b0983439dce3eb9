# SPDX-License-Identifier: Apache-2.0
"""Conversations on disk: which are written, found and removed. The sequences have no device.

Not handled: the files themselves (test_saved.py); which sequence gives way (test_residents.py).
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from stored_sequences import StoredSequence

from lily.errors import LilyError
from lily.run import shelf as shelf_module
from lily.run.saved import file_bytes
from lily.run.shelf import Shelf

IDENTITY = {"model": "m"}
LIMIT = 1 << 30
A, B, C = ([number] * 100 for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "LEAST", 1)


def shelf_of(folder: Path, limit: int = LIMIT, identity: dict[str, str] = IDENTITY) -> Shelf:
    return Shelf(folder / "shelf", limit, identity, vocab=1000)


def keep(shelf: Shelf, tokens: list[int], *points: int) -> StoredSequence:
    sequence = StoredSequence.of(tokens, points or [len(tokens)])
    shelf.keep(sequence)  # type: ignore[arg-type]
    return sequence


def found(shelf: Shelf, tokens: list[int]) -> int:
    return shelf.match(tokens)[1]


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "shelf").iterdir()}


def age(folder: Path) -> None:
    """All files were used a while ago."""
    for path in (folder / "shelf").iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**10))


def test_what_was_kept_is_found_by_its_beginning(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    keep(shelf, A, 40, 90)
    assert [found(shelf, tokens) for tokens in ([*A, 9], A, A[:50], A[:40], [*A[:89], 9], B, [])] == [
        90,
        90,
        40,
        0,
        40,
        0,
        0,
    ]
    saved, position = shelf.match([*A, 9])
    assert saved is not None
    sequence = StoredSequence()
    list(shelf.restore(saved, sequence, position))  # type: ignore[arg-type]
    assert sequence.tokens == A[:90]
    assert shelf_of(tmp_path).match([*A, 9])[1] == 90, "another engine finds it"


def test_folder_and_files_are_for_their_user_alone(tmp_path: Path) -> None:
    keep(shelf_of(tmp_path), A)
    assert stat.S_IMODE((tmp_path / "shelf").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "shelf").iterdir()} == {0o600}
    (tmp_path / "shelf").chmod(0o755)
    with pytest.raises(LilyError, match=r"cannot be kept in .*chmod 700"):
        shelf_of(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "shelf").touch()
    with pytest.raises(LilyError, match=f"cannot be kept in {tmp_path}/shelf: "):
        shelf_of(tmp_path)


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    keep(shelf, A, 40, 90)
    (file,) = (tmp_path / "shelf").iterdir()
    before = file.stat().st_ino
    keep(shelf, A, 40, 90)
    keep(shelf, A, 40)
    keep(shelf, [*A[:40], 7, 7], 40)
    assert [path.stat().st_ino for path in (tmp_path / "shelf").iterdir()] == [before]
    keep(shelf, A, 30, 90)
    assert [path.stat().st_ino for path in (tmp_path / "shelf").iterdir()] != [before], "a state is new"


def test_what_goes_on_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    keep(shelf, A)
    keep(shelf, B)
    before = names(tmp_path)
    keep(shelf, [*A, 5, 5], 102)
    assert len(names(tmp_path)) == 2
    assert len(names(tmp_path) & before) == 1
    assert found(shelf, [*A, 5, 5, 5]) == 102
    keep(shelf, [*A[:50], 8, 8], 52)  # departs in its middle
    assert len(names(tmp_path)) == 3


def test_little_is_not_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "LEAST", 100)
    shelf = shelf_of(tmp_path)
    keep(shelf, A, 99)
    keep(shelf, [])
    assert names(tmp_path) == set()
    keep(shelf, A, 100)
    assert len(names(tmp_path)) == 1


def test_beyond_the_limit_goes_what_was_used_longest_ago(tmp_path: Path) -> None:
    one = file_bytes(IDENTITY, StoredSequence.of(A, [100]))  # type: ignore[arg-type]
    shelf = shelf_of(tmp_path, limit=2 * one)
    keep(shelf, A)
    age(tmp_path)
    keep(shelf, B)
    age(tmp_path)
    saved, position = shelf.match([*A, 9])
    assert saved is not None
    list(shelf.restore(saved, StoredSequence(), position))  # type: ignore[arg-type]
    keep(shelf, C)
    assert [found(shelf, [*tokens, 9]) for tokens in (A, B, C)] == [100, 0, 100]
    assert sum(path.stat().st_size for path in (tmp_path / "shelf").iterdir()) == 2 * one
    keep(shelf_of(tmp_path, limit=one - 1), [7] * 100)  # larger than all there may be
    assert len(names(tmp_path)) == 2, "and nothing had to go for it"


def test_what_begins_the_new_one_goes_first(tmp_path: Path) -> None:
    one = file_bytes(IDENTITY, StoredSequence.of(A, [100]))  # type: ignore[arg-type]
    shelf = shelf_of(tmp_path, limit=2 * one + 500)
    keep(shelf, B)
    age(tmp_path)
    keep(shelf, A)
    keep(shelf, [*A, 5, 5], 102)
    assert [found(shelf, [*tokens, 9]) for tokens in (A, B, [*A, 5, 5])] == [0, 100, 102]


def test_files_of_others_count_but_are_not_found(tmp_path: Path) -> None:
    one = file_bytes(IDENTITY, StoredSequence.of(A, [100]))  # type: ignore[arg-type]
    keep(shelf_of(tmp_path, identity={"model": "n"}), A)
    age(tmp_path)
    (tmp_path / "shelf" / "notes.txt").write_text("mine")
    shelf = shelf_of(tmp_path, limit=one)
    assert found(shelf, [*A, 9]) == 0
    keep(shelf, B)
    assert found(shelf, [*B, 9]) == 100
    assert len(names(tmp_path)) == 2
    assert "notes.txt" in names(tmp_path)


def test_a_file_that_has_gone_or_is_damaged_is_as_if_it_had_never_been_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = shelf_of(tmp_path)
    keep(shelf, A)
    saved, position = shelf.match([*A, 9])
    assert saved is not None
    data = bytearray(saved.path.read_bytes())
    data[-200] ^= 1
    saved.path.write_bytes(data)
    sequence = StoredSequence.of(B, [50])
    with caplog.at_level(logging.WARNING, "lily"):
        list(shelf.restore(saved, sequence, position))  # type: ignore[arg-type]
    assert sequence.tokens == []
    assert "is damaged" in caplog.text
    assert found(shelf, [*A, 9]) == 0
    saved.path.write_bytes(b"nothing of the kind")
    assert found(shelf_of(tmp_path), [*A, 9]) == 0
    keep(shelf, A)  # in its place
    assert found(shelf, [*A, 9]) == found(shelf_of(tmp_path), [*A, 9]) == 100
    saved, position = shelf.match([*A, 9])
    assert saved is not None
    saved.path.unlink()
    list(shelf.restore(saved, sequence, position))  # type: ignore[arg-type]
    assert (sequence.tokens, found(shelf, [*A, 9])) == ([], 0)


def test_a_folder_that_has_gone_is_told_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = shelf_of(tmp_path)
    (tmp_path / "shelf").rmdir()
    with caplog.at_level(logging.WARNING, "lily"):
        keep(shelf, A)
    assert "a conversation of 100 tokens cannot be kept" in caplog.text
    assert found(shelf, [*A, 9]) == 0


def test_parts_of_a_process_that_was_killed_are_removed(tmp_path: Path) -> None:
    keep(shelf_of(tmp_path), A)
    part = tmp_path / "shelf" / f"conversation-x.safetensors.{2**22 + 1}.abc.part"
    part.touch()
    shelf_of(tmp_path)
    assert not part.exists()
