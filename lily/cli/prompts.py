# SPDX-License-Identifier: Apache-2.0
"""From what the user typed to the prompt's tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import is_terminal
from lily.cli.options import utf8

if TYPE_CHECKING:
    from lily.engine import Engine
    from lily.streaming import Stream


def read_prompt(prompt: str | None, positional: str | None, file: str | None) -> str:
    """The prompt from the one place where it is: an option, an argument, a file, or a pipe; ``-`` is standard input.

    UsageError if there are none or several, or if it is empty or no UTF-8 text.
    """
    given = [text for text in (prompt, positional, file) if text is not None]
    if len(given) > 1:
        raise click.UsageError("more than one prompt; give it once: as an argument, with -p TEXT or with -f FILE")
    if not given and is_terminal(sys.stdin):
        raise click.UsageError("no prompt; give it as an argument, with -p/--prompt TEXT, -f FILE, or through a pipe")
    if not given or given == ["-"]:
        where, text = "the prompt on standard input", _decoded("the prompt on standard input", _standard_input())
    elif file is not None:
        where, text = file, read_text(file)
    else:
        where, text = "the prompt", given[0]
    if not text:
        raise click.UsageError(f"{where} is empty; give at least one character")
    return text


def read_text(file: str) -> str:
    """The text of a file; UsageError if it cannot be read or is not UTF-8."""
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}") from None
    return _decoded(file, data)


def _standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""


def _decoded(where: str, data: bytes) -> str:
    try:
        return utf8(data)
    except ValueError as error:
        raise click.UsageError(f"{where} is {error}") from None


def begin_reply(
    engine: Engine, text: str, system: str | None, beginning: str | None, template_config: Mapping[str, Any] | None,
    demands: Mapping[str, Any], **how: Any,
) -> Stream:  # fmt: skip
    """The reply to ``text`` as a user's turn, or to the text as it is where there is no template and no need of one.

    ``beginning`` of the answer, after which the reply goes on. ``demands`` on it. ``how``: sampling and ``on_prompt``.
    """
    if not engine.chat_template.available and not (system or beginning or template_config or demands):
        return engine.stream(engine.tokenizer.encode(text), **how)
    from lily.text.template import reply_start

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    start = ""
    if beginning:
        prompt = engine.render_chat(messages, template_kwargs=template_config)
        start = reply_start(engine.tokenizer.decode(prompt), beginning)
    return engine.chat(messages, template_kwargs=template_config, continuation=start, stream=True, **demands, **how)
