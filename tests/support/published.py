# SPDX-License-Identifier: Apache-2.0
"""Files of the build folder that several test processes may make at the same time: each appears whole or not at all.

Not handled: two processes that do the same work; the one that ends first is as good as the other.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def publish(path: Path, text: str) -> Path:
    """Writes ``path``, which nobody sees half written; one that is right already stays as it is."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = _part(path)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A new folder to be filled, which becomes ``folder`` unless another process was first."""
    part = _part(folder)
    part.mkdir(parents=True)
    try:
        yield part
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
