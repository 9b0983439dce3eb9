# SPDX-License-Identifier: Apache-2.0
"""``--prompt-cache-file``: what the model has read is kept in a file, and not read again by the next command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lily.cli.console import Console
from lily.cli.options import Command
from lily.units import size

if TYPE_CHECKING:
    from lily.engine import Engine


def _checked(context: click.Context, parameter: click.Parameter, file: str | None) -> Path | None:
    if file is None:
        return None
    path = Path(os.path.expanduser(file))
    if path.is_dir() or not path.parent.is_dir():
        raise click.BadParameter(f"{file!r}: expected a file, which may be missing, in a folder that is there")
    return path


def prompt_cache_option(command: Command) -> Command:
    """--prompt-cache-file; the command gets ``prompt_cache_file``, for ``prompt_cache``."""
    return click.option(
        "--prompt-cache-file", metavar="FILE", callback=_checked,
        help="Go on from what FILE keeps of an earlier prompt, if it is there; at the end what was read is kept in it.",
    )(command)  # fmt: skip


@contextmanager
def prompt_cache(console: Console, engine: Engine, file: Path | None) -> Iterator[None]:
    """Reads ``file``, if it is there, and writes it at the end of the block, after Ctrl-C too. Raises LilyError."""
    if file is None:
        yield
        return
    if os.path.lexists(file):
        console.detail(f"Prompt cache: {engine.load_cache(file)} tokens from {file}")
    try:
        yield
    except KeyboardInterrupt:
        _save(console, engine, file)
        raise
    _save(console, engine, file)


def _save(console: Console, engine: Engine, file: Path) -> None:
    tokens = engine.save_cache(file)
    if tokens:
        console.detail(f"Prompt cache: {tokens} tokens to {file} ({size(file.stat().st_size)})")
    else:
        console.note(f"lily: nothing is kept in {file}: the prompt is too short to be worth it")
