# SPDX-License-Identifier: Apache-2.0
"""``lily plan``: what is computed for one step, without weights and without a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console, clip, terminal_width
from lily.cli.options import ablate_option, console_options
from lily.device.kinds import KINDS

if TYPE_CHECKING:
    from lily.checkpoint.config import ModelConfig
    from lily.plan.report import Phase

_HEADINGS = ("level", "what", "kernel", "grid", "MB")
_LEAST_NAME = 12  # characters of what and kernel that a narrow terminal still shows


@click.command()
@click.option("-m", "--model", metavar="MODEL", help="A folder, a config.json, or ORG/NAME[@REVISION] in the cache.")
@click.option("--device", type=click.Choice(tuple(KINDS)), default="metal", show_default=True)
@click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Rows of a prefill chunk.  [default: a full one]")
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens in the cache.  [default: 4096]")
@click.option("--greedy/--sample", default=True, help="How decode picks the token.  [default: greedy]")
@ablate_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of a table.")
@console_options
def plan(
    console: Console, model: str | None, device: str, phase: Phase, rows: int | None, context: int | None,
    greedy: bool, ablate: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Show the dispatches, levels and bytes of one step.

    Needs a model's config.json only, and no device. `minimum` is what has to be moved at least: weights, KV cache and
    state.
    """
    from lily.plan.report import plan_report
    from lily.policy import policy_for

    name, config = _config(model)
    context = context or min(4096, config.max_position_embeddings)
    report = {
        "model": name,
        **plan_report(config, policy_for(device, ablate), phase=phase, rows=rows, context=context, greedy=greedy),
    }
    console.write(json.dumps(report) + "\n" if as_json else _table(report, terminal_width(sys.stdout)))


def _config(spec: str | None) -> tuple[str, ModelConfig]:
    """(name, config); of a folder only its config.json is needed."""
    from lily.checkpoint.config import ModelConfig
    from lily.checkpoint.resolve import resolve_model

    path = Path(spec) if spec else None
    if path is None or not path.exists():
        found = resolve_model(spec)
        return found.name, ModelConfig.from_file(found.path / "config.json")
    file = path / "config.json" if path.is_dir() else path
    return str(spec), ModelConfig.from_file(file)


def _table(report: dict[str, Any], width: int | None) -> str:
    """A line for each dispatch, no longer than ``width`` as far as names can be shortened; then the sums."""
    rows: list[Sequence[str]] = [_HEADINGS]
    level = -1
    for d in report["list"]:
        shown, grid = d["level"] if d["level"] != level else "", "×".join(map(str, _without_ones(d["grid"])))
        mb = f"{_mb(d['bytes_read'] + d['bytes_written']):.3f}"
        rows.append((str(shown), d["label"], d["kernel"] + (" (host)" if d["host"] else ""), grid, mb))
        level = d["level"]
    lines = _columns(rows, width)
    title = f"{report['model']} on {report['device']}, {report['phase']}"
    what = f"{report['rows']} rows in a list of {report['bucket']}" if report["phase"] == "prefill" else "1 token"
    lines += [
        "",
        f"{title}: {what}, context {report['context']}" + "".join(f", without {name}" for name in report["ablate"]),
        f"{report['dispatches']} dispatches in {report['levels']} levels, {report['barriers']} barriers",
        f"{_mb(report['bytes']):.1f} MB, minimum {_mb(report['minimum_bytes']):.1f} MB "
        f"({report['bytes'] / report['minimum_bytes']:.4f} ×)",
    ]
    return "\n".join(lines) + "\n"


def _columns(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    levels, names, kernels, grids, sizes = (max(map(len, column)) for column in zip(*rows, strict=True))
    if width is not None:
        beside = levels + grids + sizes + len("  " * 4)
        names = max(_LEAST_NAME, min(names, width - beside - kernels))
        kernels = max(_LEAST_NAME, min(kernels, width - beside - names))
    form = f"{{:>{levels}}}  {{:<{names}}}  {{:<{kernels}}}  {{:<{grids}}}  {{:>{sizes}}}"
    return [
        form.format(level, clip(name, names), clip(kernel, kernels), grid, mb) for level, name, kernel, grid, mb in rows
    ]


def _without_ones(grid: list[int]) -> list[int]:
    while len(grid) > 1 and grid[-1] == 1:
        grid = grid[:-1]
    return grid


def _mb(nbytes: int) -> float:
    return nbytes / 1e6
