# SPDX-License-Identifier: Apache-2.0
"""``lily pull``: download a model. The only command that uses the network."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from lily.cli.console import Console, is_terminal
from lily.cli.options import REAL_MODEL, console_options
from lily.errors import CheckpointError

_INTERRUPTED = 130  # as of every command that Ctrl-C ends


@click.command(epilog=f"The real model: lily pull {REAL_MODEL}")
@click.argument("model", metavar="ORG/NAME[@REVISION]")
@console_options
def pull(console: Console, model: str) -> None:
    """Download a model into the Hugging Face cache.

    Only the files that Lily reads; what is there already is not downloaded again. Writes the model's folder.
    """
    from lily.checkpoint.hub import pull as download
    from lily.checkpoint.resolve import parse_hub_model

    try:
        parse_hub_model(model)
    except CheckpointError:
        raise click.BadParameter(f"{model!r}: expected ORG/NAME or ORG/NAME@REVISION") from None
    with _ending_at_once(console):
        folder = download(model, progress=not console.quiet and is_terminal(sys.stderr))
    console.write(f"{folder}\n")
    console.note(f'Run it with: lily generate -m {model} -p "…"')


@contextmanager
def _ending_at_once(console: Console) -> Iterator[None]:
    """Ctrl-C ends the process.

    As an exception it would first wait for the threads that download, each until its file of some gigabytes is there.
    Nothing is lost that way: files get their names when they are complete, and parts are taken up again.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if not console.quiet:
            with suppress(OSError):  # not print: the signal may have come in the middle of one
                os.write(2, b"\nlily: stopped; the same command goes on from here\n")
        os._exit(_INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as under nohup
        yield
        return
    try:
        signal.signal(signal.SIGINT, leave)
    except ValueError:  # not the main thread: signals do not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
