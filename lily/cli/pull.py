# SPDX-License-Identifier: Apache-2.0
"""`lily pull`: download a model. The only command that uses the network."""

from __future__ import annotations

import sys

import click

from lily.cli.console import Console, is_terminal
from lily.cli.options import REAL_MODEL, console_options
from lily.errors import CheckpointError


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
    folder = download(model, progress=not console.quiet and is_terminal(sys.stderr))
    console.write(f"{folder}\n")
    console.note(f'Run it with: lily generate -m {model} -p "…"')
