# SPDX-License-Identifier: Apache-2.0
"""``lily tune``: measure options of the GPU on this machine and keep what is faster."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

import click

from lily.cli.console import Console
from lily.cli.options import EngineFlags, console_options, model_options

if TYPE_CHECKING:
    from lily.tune import Result


@click.command()
@model_options
@click.option(
    "--rounds", type=click.IntRange(min=2), default=3, show_default=True, help="Times to load and measure each."
)
@click.option("--tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of a measurement.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of lines.")
@console_options
def tune(console: Console, flags: EngineFlags, rounds: int, tokens: int, as_json: bool) -> None:
    """Find the faster options of the GPU for a model.

    The model is loaded several times and decodes with each option in turn. What is faster beyond the noise is kept and
    used from then on, with this model, chip, macOS and version of Lily. Close other programs first.
    """
    from lily.checkpoint.resolve import resolve_model
    from lily.device.kinds import choose_device, kind_of
    from lily.device.tuned import remember
    from lily.tune import measure

    device = choose_device(flags.device)
    model = resolve_model(flags.model)
    options = kind_of(device).tunable
    if not options:
        console.note(f"lily: there is nothing to tune on the {device} device")
        if as_json:
            console.write(json.dumps({"device": device, "model": model.name, "options": []}) + "\n")
        return
    report = []
    for option in options:
        result = measure(device, option, lambda: flags.open(console), rounds=rounds, tokens=tokens)
        path = remember(model.key, option, result.winner, result.milliseconds)
        report.append(
            {
                "option": option.name, "default": option.default, "winner": result.winner,
                "milliseconds": result.milliseconds, "problem": result.problem,
            }
        )  # fmt: skip
        if not as_json:
            console.write("\n".join(_lines(result)) + "\n")
        console.detail(f"lily: kept in {path}")
    if as_json:
        console.write(json.dumps({"device": device, "model": model.name, "options": report}) + "\n")


def _lines(result: Result) -> list[str]:
    option = result.option
    lines = []
    for value in option.values:
        times = result.milliseconds[value]
        if times:
            spread = f"{min(times):.3f} to {max(times):.3f}"
            lines.append(f"{option.name}={value}: {statistics.median(times):.3f} ms a token ({spread})")
    if result.problem is not None:
        lines.append(f"{option.name}={option.other} cannot be used here: {result.problem}")
    elif result.winner == option.default:
        lines.append(f"{option.name}={option.default} stays: the other one is not faster beyond the noise")
    if result.winner != option.default:
        lines.append(f"{option.name}={option.other} is {100 * result.gain:.1f} % faster and used from now on")
    return lines
