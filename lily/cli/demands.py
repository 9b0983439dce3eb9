# SPDX-License-Identifier: Apache-2.0
"""Options that say what the reply has to be; the engine holds it to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from lily.cli.options import shell_text
from lily.cli.prompts import read_text


def demand_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--reasoning-budget and --json-schema; the command gets ``demands``, arguments of ``Engine.chat`` by name."""

    @click.option(
        "--reasoning-budget", type=click.IntRange(min=0), metavar="N", help="End the reasoning after N tokens."
    )
    @click.option("--json-schema", type=shell_text, metavar="FILE", help="The answer is JSON of the schema in FILE.")
    @wraps(command)
    def call(*args: Any, reasoning_budget: int | None, json_schema: str | None, **rest: Any) -> None:
        demands: dict[str, Any] = {} if reasoning_budget is None else {"reasoning_budget": reasoning_budget}
        if json_schema is not None:
            schema = _schema(json_schema)
            demands["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        command(*args, demands=demands, **rest)

    return call


def _schema(file: str) -> dict[str, Any]:
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{file} is not valid JSON: {error}", param_hint="--json-schema") from None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{file} holds no JSON object; a schema is one", param_hint="--json-schema")
    return value
