# SPDX-License-Identifier: Apache-2.0
"""``lily serve``: the model behind OpenAI's endpoints, until Ctrl-C or SIGTERM.

Everything that would make the server useless or unsafe is said before the model is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console
from lily.cli.generate import describe
from lily.cli.options import EngineFlags, console_options, engine_options, json_object, nbytes, shell_text
from lily.cli.prompts import read_text
from lily.errors import LilyError
from lily.server.settings import Settings

if TYPE_CHECKING:
    from lily.engine import Engine
    from lily.server.app import App

KEY_VARIABLE = "LILY_API_KEY"
LEAST_QUEUE = 16
"""Agents send that many requests at once; none of them may be sent away."""

_EVERYWHERE = ("", "0.0.0.0", "::")  # addresses to listen on, but no names of this machine
_LEVELS = ("debug", "info", "warning", "error")
_MISSING = "lily serve needs starlette and uvicorn; install them with: pip install '.[serve]'"


def _names(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))


@click.command()
@engine_options
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    metavar="PORT",
    help="0 is any free one; the address is printed.",
)
@click.option("--api-key-file", metavar="FILE", help=f"Clients must show the key in FILE. Or set {KEY_VARIABLE}.")
@click.option("--api-key", type=shell_text, metavar="KEY", help="The key itself; other users of the machine see it.")
@click.option("--no-api-key", is_flag=True, help="Let other machines in without a key.")
@click.option(
    "--allowed-hosts",
    multiple=True,
    metavar="NAME",
    callback=_names,
    help="Further names of this machine in the Host header. Repeatable, or joined by commas.",
)
@click.option(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    callback=_names,
    help="Web pages that may use the server; * is all. Repeatable, or joined by commas.",
)
@click.option("--served-model-name", type=shell_text, metavar="NAME", help="The model's name in responses.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most this many tokens a reply.  [default: to the end of the context]",
)
@click.option(
    "--sequences",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Conversations that stay on the device, and requests that run at a time.  [default: 4, with little memory 2]",
)
@click.option(
    "--cache-bytes",
    metavar="BYTES",
    callback=nbytes,
    help="For conversations on the device: 8GB, 8GiB.  [default: a quarter of its memory]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Keep conversations there that have to give way, and those of today for tomorrow.",
)
@click.option(
    "--cache-disk-bytes", metavar="BYTES", callback=nbytes, help="At most so much in that folder.  [default: 10GB]"
)
@click.option(
    "--idle-unload",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Unload the model after so long without a request; the next one loads it again.",
)
@click.option(
    "--queue",
    type=click.IntRange(LEAST_QUEUE, 4096),
    default=Settings.queue,
    show_default=True,
    metavar="N",
    help="Requests that may wait.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=1, max=86400),
    default=Settings.request_timeout,
    show_default=True,
    metavar="SECONDS",
    help="How long a client may take to send a request, and may leave a reply unread.",
)
@click.option(
    "--chat-template-args",
    "template_args",
    type=shell_text,
    metavar="JSON",
    callback=json_object,
    help="Options of the chat template where a request has none.",
)
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True)
@console_options
def serve(console: Console, flags: EngineFlags, host: str, port: int, log_level: str, **options: Any) -> None:
    """Serve the model to OpenAI's clients.

    POST /v1/chat/completions and /v1/completions, GET /v1/models and more (docs/serving.md). Ctrl-C ends it.
    """
    key = _key(options["api_key_file"], options["api_key"])
    if key is not None and options["no_api_key"]:
        raise click.UsageError("--no-api-key and a key exclude each other; leave one of them out")
    if options["api_key"] is not None:
        console.note(f"lily: other users of this machine see --api-key; --api-key-file and {KEY_VARIABLE} hide it")
    try:
        from lily.server.serving import bind, is_exposed, url
        from lily.server.serving import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lily"):
            raise
        raise LilyError(_MISSING) from None
    with closing(bind(host, port)) as bound:
        if is_exposed(bound) and key is None and not options["no_api_key"]:
            raise click.UsageError(
                f"--host {host} lets other machines in, and there is no key; give --api-key-file FILE or set "
                f"{KEY_VARIABLE}, or stay on --host 127.0.0.1 (--no-api-key lets everybody in)"
            )
        how = _engine_options(options)
        with (
            _logging("error" if console.quiet else log_level),
            flags.open(console, **how) as engine,
            closing(_app(engine, host, key, options, partial(flags.engine, **how))) as app,
        ):
            describe(console, engine)
            address = url(bound, host)

            def ready() -> None:
                console.note(f"lily: serving {engine.model.name}; Ctrl-C ends it")
                console.write(address + "\n")

            run(app, bound, ready)


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the flags that are for the engine."""
    if options["cache_disk_bytes"] is not None and options["cache_dir"] is None:
        raise click.UsageError("--cache-disk-bytes is of no use without --cache-dir FOLDER; give both, or none")
    names = ("sequences", "cache_bytes", "cache_dir", "cache_disk_bytes")
    return {name: options[name] for name in names if options[name] is not None}


def _app(engine: Engine, host: str, key: str | None, options: dict[str, Any], reopen: Callable[[], Engine]) -> App:
    """The application that the flags ask for."""
    from lily.server.app import App
    from lily.server.guards import normalised_hosts

    settings = Settings(
        model=options["served_model_name"] or engine.model.name,
        hosts=normalised_hosts(options["allowed_hosts"] if host in _EVERYWHERE else (host, *options["allowed_hosts"])),
        origins=frozenset(options["allowed_origins"]),
        key=key,
        max_tokens=options["max_tokens"],
        queue=options["queue"],
        request_timeout=options["request_timeout"],
        template_args=options["template_args"] or {},
        idle_unload=options["idle_unload"],
    )
    return App(engine, settings, reopen)


def _key(file: str | None, given: str | None) -> str | None:
    """The API key: of the one place that has it, or of the environment; None if there is none."""
    if file is not None and given is not None:
        raise click.UsageError("--api-key and --api-key-file exclude each other; give one of them")
    if given is not None:
        where, key = "--api-key", given
    elif file is not None:
        where, key = file, read_text(file).strip()
    elif KEY_VARIABLE in os.environ:
        where, key = KEY_VARIABLE, os.environ[KEY_VARIABLE].strip()
    else:
        return None
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        raise click.UsageError(f"{where} holds no key; allowed: printable ASCII characters without blanks")
    return key


@contextmanager
def _logging(level: str) -> Iterator[None]:
    """The server's log on standard error, a line a request; of its library only what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    with (
        _logged("lily", level.upper(), handler),
        _logged("uvicorn.error", "DEBUG" if level == "debug" else "ERROR", handler),
    ):
        yield


@contextmanager
def _logged(name: str, level: str, handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
