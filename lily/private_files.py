# SPDX-License-Identifier: Apache-2.0
"""Files that only this user may read, and that are whole whenever somebody else looks.

What is written goes into a file beside the one that it becomes, which takes that one's place in the end: a process that
is killed at any byte leaves the old one as it was, and a part that ``remove_parts`` finds.
Not handled: a machine that loses its power; who reads such files has to see whether they are damaged.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_PART = ".part"
_WRITTEN_BY = re.compile(r"\.(\d{1,9})\.\w+\.part$", re.ASCII)


def check_private(folder: Path) -> None:
    """PermissionError unless only this user can read and write ``folder``."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(0, f"the folder is open to other users (chmod 700 {folder})", str(folder))


def make_private(folder: Path) -> None:
    """Makes ``folder`` if it is not there. PermissionError unless only this user can read and write it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``target`` at the end of the block; nothing of it stays if that fails."""
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.{os.getpid()}.", suffix=_PART, dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def remove_parts(folder: Path) -> None:
    """Removes what processes have left behind that were killed while they wrote."""
    for path in folder.glob(f"*{_PART}"):
        written_by = _WRITTEN_BY.search(path.name)
        if written_by and not _runs(int(written_by[1])):
            with suppress(OSError):
                path.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
