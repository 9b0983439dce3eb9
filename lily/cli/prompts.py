# SPDX-License-Identifier: Apache-2.0
"""From what the user typed to the prompt's tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lily.engine import Engine

_END_THINK = "\n</think>\n\n"


def read_prompt(prompt: str) -> str:
    """``prompt``, or for ``-`` all of standard input; UsageError if it is empty or not UTF-8 text."""
    where = "the prompt"
    if prompt == "-":
        where = "the prompt on standard input"
        data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    else:
        data = prompt.encode("utf-8", "surrogateescape")  # as the shell gave it
    if not data:
        raise click.UsageError(f"{where} is empty; give at least one character")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{where} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})") from None


def prompt_tokens(
    engine: Engine, text: str, system: str | None, reply: str | None, template_config: Mapping[str, Any] | None
) -> list[int]:
    """``text`` as a user's turn, or as it is where the checkpoint has no template and nothing needs one."""
    if not engine.chat_template.available and not (system or reply or template_config):
        return engine.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    tokens = engine.render_chat(messages, template_kwargs=template_config)
    if not reply:
        return tokens
    start = reply_start(engine.tokenizer.decode(tokens), reply)
    return engine.render_chat(messages, template_kwargs=template_config, continuation=start)


def reply_start(prompt: str, reply: str) -> str:
    """What to put after the rendered ``prompt`` so that the answer, not the reasoning before it, begins with ``reply``.

    A reply that itself opens with <think> continues the reasoning.
    """
    from lily.text.template import starts_in_reasoning

    if not starts_in_reasoning(prompt):
        return reply
    if reply.startswith("<think>"):
        return reply.removeprefix("<think>").removeprefix("\n")
    if "</think>" in reply:
        return reply
    return _END_THINK + reply
