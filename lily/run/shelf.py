# SPDX-License-Identifier: Apache-2.0
"""Conversations on disk that had to give way on the device, in a folder with a limit.

A conversation is written when it gives way, and when the engine ends, if it is not there already; one that goes on
takes the place of its beginning.  Beyond the limit that file goes that was used longest ago.  Several engines may
share a folder: each reads what the others have written; a file that has gone, or is damaged, is as if it had never been
there.
Nothing here fails a request: what cannot be written or read is said in the log, and read again from its prompt.
Not handled: the format (saved.py), who gives way (residents.py).
"""

from __future__ import annotations

import logging
import os
from collections import abc
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from lily.errors import CacheError, LilyError
from lily.private_files import make_private, remove_parts
from lily.run.history import common_prefix
from lily.run.identity import key_of
from lily.run.saved import Pieces, Saved, file_bytes, read, restore, save
from lily.run.sequence import Sequence

LOG = logging.getLogger(__name__)
LEAST = 512
"""Tokens below which a conversation is not worth a file: they are read again as quickly."""

_PREFIX, _SUFFIX = "conversation-", ".safetensors"


class Shelf:
    """Files in ``folder`` of together at most ``limit`` bytes. LilyError: the folder cannot be used, or others can.

    vocab: token ids are below it.
    """

    def __init__(self, folder: Path, limit: int, identity: Mapping[str, str], *, vocab: int) -> None:
        try:
            make_private(folder)
            remove_parts(folder)
        except OSError as error:
            raise LilyError(f"conversations cannot be kept in {folder}: {error.strerror}") from None
        self._folder, self._limit, self._identity, self._vocab = folder, limit, identity, vocab
        self._mine = f"{_PREFIX}{key_of(identity)}-"
        self._known: dict[str, Saved | None] = {}  # by name; None: of no use

    def match(self, tokens: abc.Sequence[int]) -> tuple[Saved | None, int]:
        """What goes farthest along ``tokens``, and the position in it from which they go on."""
        best, farthest = None, 0
        for saved in self._files():
            point = saved.point(min(common_prefix(saved.tokens, tokens), len(tokens) - 1))
            if point > farthest:
                best, farthest = saved, point
        return best, farthest

    def restore(self, saved: Saved, sequence: Sequence, position: int) -> Pieces:
        """As ``saved.restore``, but for a file that is of no use any more: then the sequence is empty in the end."""
        try:
            yield from restore(saved, self._identity, sequence, position)
        except CacheError as error:
            LOG.warning("%s", error)
            self._known[saved.path.name] = None
        else:
            with suppress(OSError):
                os.utime(saved.path)

    def keep(self, sequence: Sequence) -> None:
        """Writes ``sequence``, of which nothing is in flight, unless it is there or is not worth it."""
        points = sequence.positions()
        length = max(points, default=0)
        if length < LEAST:
            return
        tokens = sequence.tokens[:length]
        files = self._files()
        if any(saved.tokens[:length] == tokens and points <= set(saved.points) for saved in files):
            return
        beginnings = [saved for saved in files if tokens[: saved.latest] == saved.tokens]
        name = f"{self._mine}{sha256(repr(tokens).encode()).hexdigest()[:16]}{_SUFFIX}"
        if not self._make_room(file_bytes(self._identity, sequence), beginnings):
            return
        try:
            self._known[name] = save(self._folder / name, self._identity, sequence)
        except OSError as error:
            LOG.warning("a conversation of %d tokens cannot be kept in %s: %s", length, self._folder, error.strerror)
            return
        for saved in beginnings:
            if saved.path.name != name:
                self._remove(saved.path)

    def _make_room(self, nbytes: int, beginnings: list[Saved]) -> bool:
        """Whether so many bytes fit: first what begins the new file goes, then what was used longest ago."""
        if nbytes > self._limit:
            return False
        replaced = {saved.path.name for saved in beginnings}
        found = sorted(self._stats(), key=lambda file: (file[0].name not in replaced, file[1].st_mtime_ns))
        used = sum(status.st_size for _, status in found)
        for path, status in found:
            if used + nbytes <= self._limit:
                break
            self._remove(path)
            used -= status.st_size
        return True

    def _files(self) -> list[Saved]:
        """Those of this identity; new ones are read."""
        names = [path.name for path, _ in self._stats() if path.name.startswith(self._mine)]
        for name in names:
            if name not in self._known:
                try:
                    self._known[name] = read(self._folder / name, self._identity, vocab=self._vocab)
                except CacheError as error:
                    LOG.warning("%s", error)
                    self._known[name] = None
        self._known = {name: self._known[name] for name in names}
        return [saved for saved in self._known.values() if saved is not None]

    def _stats(self) -> list[tuple[Path, os.stat_result]]:
        """All conversations in the folder, those of other models and versions too."""
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                    with suppress(OSError):  # another engine has just removed it
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
        return found

    @staticmethod
    def _remove(path: Path) -> None:
        with suppress(OSError):
            path.unlink()
