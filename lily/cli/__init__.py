# SPDX-License-Identifier: Apache-2.0
"""The ``lily`` command: its group of commands, and how every one of them ends.

Exit codes: 0 done, 1 failure, 2 usage, 130 Ctrl-C, 141 the reader of standard output went away.
Modules of this package import nothing heavy at the top, so that --help and --version answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from lily._version import __version__
from lily.cli import chat, doctor, generate, info, plan, pull, serve, tune
from lily.cli.console import Console, OutputError, discard, standard_streams, warnings_as_notes
from lily.cli.options import in_flags
from lily.errors import LilyError

FAILURE, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


class _Commands(click.Group):
    """A group that knows what a misspelt command was meant to be."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            near = get_close_matches(name, self.commands, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.commands)}"
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lily", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Local inference for Qwen3.6-35B-A3B and its family."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    generate.generate, chat.chat, serve.serve, plan.plan, info.info, doctor.doctor, pull.pull, tune.tune
):  # fmt: skip
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    if "_LILY_COMPLETE" in os.environ:
        cli.main(prog_name="lily")
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: Sequence[str]) -> int:
    """Runs one command and returns its exit code; what a user can cause ends in one message, not in a traceback."""
    with standard_streams():
        return _run(args, Console())


def _run(args: Sequence[str], console: Console) -> int:
    try:
        with warnings_as_notes(console):
            return _invoke(args, console)
    except KeyboardInterrupt:
        console.interrupted()
        return INTERRUPTED
    except OutputError as error:
        return _unwritable(console, error)
    except click.ClickException as error:
        console.error(_usage(error))
        return error.exit_code
    except LilyError as error:
        console.error(in_flags(error))
    except OSError as error:
        if error.filename is None:  # click's own output: help and version
            return _unwritable(console, OutputError.of(error))
        console.error(f"{error.filename}: {error.strerror}")
    except Exception as error:
        if console.verbose:
            raise
        console.error(f"this is a bug in Lily: {type(error).__name__}: {error} (--verbose shows where)")
    return FAILURE


def _unwritable(console: Console, error: OutputError) -> int:
    # What is still buffered cannot be written either; without this the interpreter would complain about it at exit.
    discard(sys.stdout)
    if error.broken_pipe:
        return PIPE_CLOSED
    console.error(str(error))
    return FAILURE


def _invoke(args: Sequence[str], console: Console) -> int:
    try:
        with cli.make_context("lily", list(args), obj=console) as context:
            cli.invoke(context)
        code = 0
    except click.exceptions.Exit as done:
        code = done.exit_code
    sys.stdout.flush()
    return code


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if isinstance(error, click.UsageError) and context is not None:
        see = f"see {context.command_path} --help"
        message += f" ({see})" if message.endswith("?") else f"; {see}"
    return message
