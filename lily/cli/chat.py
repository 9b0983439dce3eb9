# SPDX-License-Identifier: Apache-2.0
"""``lily chat``: a conversation in the terminal, or line by line from a pipe.

Not handled: editing of earlier turns, and folding away of reasoning that was shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console, is_terminal
from lily.cli.demands import demand_options
from lily.cli.generate import cut_off, describe, statistics
from lily.cli.interrupts import Interrupts
from lily.cli.keyboard import Keyboard, hidden_typing
from lily.cli.options import (
    EngineFlags,
    SamplingFlags,
    chat_template_options,
    console_options,
    engine_options,
    in_flags,
    reasoning_option,
    sampling_options,
    system_option,
)
from lily.cli.prompt_cache import prompt_cache, prompt_cache_option
from lily.cli.prompts import read_text
from lily.cli.shown import ShownReply
from lily.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from lily.session import Session

HELP = """\
/reset        forget the conversation
/regen        another reply to the last message
/system TEXT  set the system prompt and forget the conversation; - is none; without TEXT it is shown
/read FILE    put a file's text before the next message
/save FILE    write the conversation into a new file, as JSON
/help         this list
/exit         leave, as Ctrl-D does
Anything else is a message; // at its beginning stands for a / that begins no command.
Ctrl-C stops a reply and clears a line; twice on an empty line it leaves."""
_SEEDS = 1 << 64


@click.command()
@system_option
@chat_template_options
@demand_options
@reasoning_option
@engine_options
@sampling_options
@prompt_cache_option
@console_options
def chat(
    console: Console, flags: EngineFlags, sampling: SamplingFlags, system_prompt: str | None,
    template_config: dict[str, Any] | None, demands: dict[str, Any], reasoning: bool | None,
    prompt_cache_file: Path | None,
) -> None:  # fmt: skip
    """Chat with the model.

    Ctrl-C stops a reply. /help lists what can be typed besides a message. From a pipe every line is a message.
    """
    interactive = is_terminal(sys.stdin)
    with hidden_typing() if interactive else nullcontext():
        engine = flags.open(console)
    with engine, prompt_cache(console, engine, prompt_cache_file):
        describe(console, engine)
        # What would fail with every message is said at once.
        engine.render_chat([{"role": "user", "content": "Hi"}], template_kwargs=template_config)
        session = engine.session(system=system_prompt, template_kwargs=template_config)
        arguments = {**sampling.for_engine(engine), **demands}
        talk = _Conversation(session, sampling, arguments, console, interactive, reasoning)
        if interactive:
            console.note("Type a message; /help for more, /exit or Ctrl-D to leave.")
        with talk.interrupts.noted():
            for line in _typed(talk.interrupts, console) if interactive else _piped(talk.interrupts):
                if not talk.take(line):
                    return


class _Conversation:
    """A session, and what is typed into it: commands and messages."""

    def __init__(
        self, session: Session, sampling: SamplingFlags, arguments: dict[str, Any], console: Console,
        interactive: bool, reasoning: bool | None,
    ) -> None:  # fmt: skip
        self.session, self.sampling, self.arguments, self.console = session, sampling, arguments, console
        self.interactive, self.reasoning = interactive, reasoning
        self.interrupts = Interrupts()
        self._read = ""  # of files, for the next message
        self._again = 0  # replies to the last message before
        # Name -> (what to do, whether text follows the name).
        self._commands: dict[str, tuple[Callable[[str], None], bool]] = {
            "/reset": (self._reset, False),
            "/regen": (self._regenerate, False),
            "/system": (self._system, True),
            "/read": (self._read_file, True),
            "/save": (self._save, True),
            "/help": (lambda _: self.console.note(HELP), False),
        }

    def take(self, line: str) -> bool:
        """Runs a command or answers a message; False ends the chat."""
        name, _, rest = line.strip().partition(" ")
        if line.strip() in ("/exit", "/quit"):
            return False
        run, has_text = self._commands.get(name, (None, False))
        try:
            if run is not None and (has_text or not rest):
                run(rest.strip())
            elif line.strip() and not self._is_misspelt(line.strip()):
                self._again = 0
                self._answer({"role": "user", "content": self._message(line)})
                self._read = ""
        except (ContextLengthError, InvalidRequestError) as error:
            if not self.interactive:
                raise
            self.console.error(f"{in_flags(error)}; /reset forgets the conversation")
        except click.UsageError as error:
            if not self.interactive:
                raise
            self.console.error(error.format_message())
        return True

    def _message(self, line: str) -> str:
        return self._read + (line[1:] if line.startswith("//") else line)

    def _is_misspelt(self, text: str) -> bool:
        """Whether a person has meant a command; then it is said. What comes through a pipe is taken as it is."""
        near = get_close_matches(text, [*self._commands, "/exit"], 1, 0.7) if text.startswith("/") else []
        if not near or not self.interactive or len(text.split()) > 1:
            return False
        self.console.error(f"there is no command {text}; did you mean {near[0]}? To send it as a message: /{text}")
        return True

    def _reset(self, _: str) -> None:
        self.session.reset()
        self._read = ""
        self.console.note("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        session, say = self.session, self.console.note
        if not text:
            say(f"The system prompt: {session.system}" if session.system else "There is no system prompt.")
            return
        session.system = None if text == "-" else text
        session.reset()
        say("The system prompt is set." if session.system else "There is no system prompt now.")

    def _read_file(self, name: str) -> None:
        if not name:
            raise click.UsageError("/read needs the name of a file")
        text = read_text(str(Path(name).expanduser()))
        self._read += text if text.endswith("\n") else text + "\n"
        self.console.note(f"{len(text):,} characters of {name} will stand before the next message.")

    def _save(self, name: str) -> None:
        if not name:
            raise click.UsageError("/save needs the name of a file")
        document = json.dumps(self.session.messages, ensure_ascii=False, indent=2) + "\n"
        try:
            with open(Path(name).expanduser(), "x", encoding="utf-8") as file:
                file.write(document)
        except OSError as error:
            raise click.UsageError(f"{name} cannot be written: {error.strerror}") from None
        self.console.note(f"{len(self.session.messages)} messages are saved in {name}.")

    def _regenerate(self, _: str) -> None:
        session, kept = self.session, self.session.messages
        if len(kept) < 2 or kept[-1]["role"] != "assistant":
            raise click.UsageError("/regen needs a reply; there is none yet")
        self._again += 1
        session.messages = kept[:-2]
        try:
            self._answer(kept[-2])
        finally:
            if len(session.messages) < len(kept):  # nothing came in its place
                session.messages = kept

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Shows the reply as it comes; Ctrl-C ends it after the token, or chunk of the prompt, being computed."""
        completion, console = None, self.console
        shown = ShownReply(console, self.reasoning)
        arguments, bar = dict(self.arguments), console.reading()
        if self._again and arguments["seed"] is not None:
            arguments["seed"] = (arguments["seed"] + self._again) % _SEEDS  # the same one gives the same reply
        self.interrupts.begin()
        with hidden_typing() if self.interactive else nullcontext():
            try:
                with self.session.stream(message, on_prompt=bar, **arguments) as reply:
                    self.interrupts.cancels(reply.cancel)
                    for chunk in reply:
                        shown.chunk(chunk)
                        completion = chunk.completion
            finally:
                if bar:
                    bar.clear()
            shown.end()
        if completion is None:
            console.note("(stopped)")
            return
        if completion.finish_reason == "length":
            console.note(cut_off(completion, self.sampling))
        if console.verbose:
            statistics(console, completion)


def _typed(interrupts: Interrupts, console: Console) -> Iterator[str]:
    """What is typed at the terminal, until Ctrl-D, or Ctrl-C twice on an empty line."""
    keyboard, warned = Keyboard(), False
    while True:
        try:
            with interrupts.raised():
                line = keyboard.read()
        except EOFError:
            console.note("")
            return
        except KeyboardInterrupt:
            console.note("")
            if warned and not keyboard.half_typed:
                raise
            warned = not keyboard.half_typed
            if warned:
                console.note("(Ctrl-C again, /exit or Ctrl-D leaves)")
            continue
        except ValueError as error:
            console.error(f"the message is {error}")
            continue
        warned = False
        yield line


def _piped(interrupts: Interrupts) -> Iterator[str]:
    """The lines of standard input."""
    number = 0
    while sys.stdin is not None:
        with interrupts.raised():
            line = sys.stdin.buffer.readline()
        if not line:
            return
        number += 1
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise click.UsageError(f"line {number} of standard input is not UTF-8 text") from None
