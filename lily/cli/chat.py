# SPDX-License-Identifier: Apache-2.0
"""`lily chat`: a conversation in the terminal, or line by line from a pipe.

Not handled: editing of earlier turns, and folding away of reasoning; the reply is shown as the model writes it.
"""

from __future__ import annotations

import importlib
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console, is_terminal
from lily.cli.generate import describe, statistics
from lily.cli.options import (
    EngineFlags,
    SamplingFlags,
    chat_template_option,
    console_options,
    engine_options,
    sampling_options,
)
from lily.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from lily.session import Session

PROMPT = "> "
HELP = """\
/reset        forget the conversation
/system TEXT  set the system prompt and forget the conversation; without TEXT there is none
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C stops a reply; at the prompt it leaves."""
_PASTE_SECONDS = 0.02  # lines of one paste follow each other faster than a person types
_UNLIMITED = (1 << 31) - 1  # the engine ends the reply where the context does


@click.command()
@click.option("--system-prompt", metavar="TEXT", help="System message of the chat.")
@chat_template_option
@engine_options
@sampling_options(_UNLIMITED, "At most this many tokens a reply.  [default: what the context holds]")
@console_options
def chat(
    console: Console, flags: EngineFlags, sampling: SamplingFlags, system_prompt: str | None,
    template_config: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Chat with the model.

    Ctrl-C stops a reply. /help lists what can be typed besides a message. From a pipe every line is a message.
    """
    with flags.open(console) as engine:
        describe(console, engine)
        # What would fail with every message is said at once.
        engine.render_chat([{"role": "user", "content": "Hi"}], template_kwargs=template_config)
        arguments = sampling.for_engine(engine)
        session = engine.session(system=system_prompt, template_kwargs=template_config)
        interactive = is_terminal(sys.stdin)
        if interactive:
            console.note("Type a message; /help for more, /exit or Ctrl-D to leave.")
        for line in _messages(interactive):
            if line.startswith("/"):
                if not _command(line, session, console):
                    return
            elif line.strip():
                try:
                    _reply(session, line, arguments, console)
                except (ContextLengthError, InvalidRequestError) as error:
                    if not interactive:
                        raise
                    console.error(f"{error}; /reset forgets the conversation")


def _command(line: str, session: Session, console: Console) -> bool:
    """Runs a line that begins with a slash; False ends the chat."""
    name, _, rest = line.strip().partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        session.reset()
        console.note("The conversation is forgotten.")
    elif name == "/system":
        session.system = rest.strip() or None
        session.reset()
        console.note("The system prompt is set." if session.system else "There is no system prompt now.")
    elif name == "/help":
        console.note(HELP)
    else:
        console.error(f"there is no command {name}; /help lists them")
    return True


def _reply(session: Session, message: str, arguments: dict[str, Any], console: Console) -> None:
    """Shows the reply as it comes; Ctrl-C ends it after the token that is being computed."""
    completion = None
    with session.stream(message, **arguments) as pieces, _interrupts(pieces.cancel):
        for chunk in pieces:
            console.write(chunk.text)
            completion = chunk.completion
    console.write("\n")
    if completion is None:
        console.note("(stopped)")
    else:
        if completion.finish_reason == "length":
            console.note(f"(cut off after {completion.completion_tokens} tokens)")
        if console.verbose:
            statistics(console, completion)


@contextmanager
def _interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``cancel`` instead of breaking in at any instruction, where it could tear the engine's state.

    A reply ends with its next token, a long prompt with its next chunk; a second Ctrl-C breaks in after all.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        cancel()

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: signals do not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _messages(interactive: bool) -> Iterator[str]:
    """Lines of standard input until its end; from a terminal a paste of several lines is one message."""
    if not interactive:
        yield from _piped_lines()
        return
    with suppress(ImportError):
        importlib.import_module("readline")  # gives input() editing and history
    while True:
        try:
            yield _typed()
        except EOFError:
            print(file=sys.stderr)
            return


def _typed() -> str:
    # Where only standard input is a terminal, input() would write its prompt into the result.
    visible = is_terminal(sys.stdout)
    if not visible:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    lines = [input(PROMPT if visible else "")]
    while select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


def _piped_lines() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise click.UsageError(f"line {number} of standard input is not UTF-8 text") from None
