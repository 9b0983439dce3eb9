# SPDX-License-Identifier: Apache-2.0
"""``lily doctor``: checks and measures every kernel on this machine, for people and for bug reports."""

from __future__ import annotations

import json
import sys

import click

from lily.cli.console import Console, terminal_width
from lily.cli.options import DEVICES, console_options

_WIDTH = 100  # characters of a line of prose that no terminal shows


@click.command()
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("-t", "--threads", type=click.IntRange(min=1), metavar="N", help="Threads of the cpu device.")
@click.option("--quick", is_flag=True, help="Only check results, measure nothing.")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel. Repeatable.")
@click.option("--explain", is_flag=True, help="Only say what the figures of a report mean.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object, for a bug report, instead of a table.")
@console_options
def doctor(
    console: Console, device: str, threads: int | None, quick: bool, kernels: tuple[str, ...],
    explain: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check and measure every kernel on this machine.

    Compares each kernel with the cpu device's results and measures it beside what the machine can do; takes about a
    minute. What does not work is said with what to do, and makes the exit code 1. The report names no person and no
    file of yours.
    """
    from lily.doctor import examine, explanation, render

    if explain:
        console.write(explanation(terminal_width(sys.stdout) or _WIDTH))
        return
    document = examine(
        device, quick=quick, threads=threads, kernels=kernels, say=lambda text: console.note(f"lily: {text}")
    )
    console.write(json.dumps(document, ensure_ascii=False) + "\n" if as_json else render(document))
    if not document["ok"]:
        raise click.exceptions.Exit(1)
