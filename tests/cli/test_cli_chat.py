# SPDX-License-Identifier: Apache-2.0
"""`lily chat` from a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import NO_END, failure, lily_process
from paths import EMBEDDED

import lily
from lily.cli import run
from lily.cli.chat import _interrupts


def piped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_chat_from_a_pipe_answers_line_by_line_and_remembers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--temp", "0", "--chat-template-config", '{"enable_thinking": false}', "--quiet"]
    piped("My name is Tom.\n\nWhat is my name?\n", monkeypatch)
    assert run(["chat", *flags]) == 0
    out, err = capsys.readouterr()
    with lily.Engine() as engine:
        session = engine.session(template_kwargs={"enable_thinking": False})
        replies = [session.send(text, temperature=0).text for text in ("My name is Tom.", "What is my name?")]
    assert (out, err) == ("".join(f"{reply}\n" for reply in replies), "")
    assert "Tom" in replies[1]


def test_chat_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[dict[str, Any]]] = []

    def render(self: lily.Engine, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        sent.append([dict(message) for message in messages])
        return [1]

    def request(self: lily.Engine, prompt: list[int], sampling: dict[str, Any]) -> Any:
        return lambda control: (lily.StreamChunk(text) for text in ("o", "k"))

    monkeypatch.setattr("lily.Engine.render_chat", render)
    monkeypatch.setattr("lily.Engine.request", request)
    piped("a\nb\n/reset\nc\n/system S\nd\n/help\n/what\n/exit\ne\n", monkeypatch)
    assert run(["chat"]) == 0
    user = [{"role": "user", "content": text} for text in "abcd"]
    ok = {"role": "assistant", "content": "ok"}
    # The first is the command's own look whether the template works.
    assert sent[1:] == [[user[0]], [user[0], ok, user[1]], [user[2]], [{"role": "system", "content": "S"}, user[3]]]
    out, err = capsys.readouterr()
    assert out == "ok\n" * 4
    assert "/reset" in err
    assert "lily: error: there is no command /what" in err


def test_chat_from_a_pipe_fails_at_the_first_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("a long message that does not fit\nHi\n", monkeypatch)
    assert "tokens" in failure(["chat", "--max-context", "12"], capsys)


def test_chat_needs_a_template(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in EMBEDDED.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    piped("Hi\n", monkeypatch)
    assert "no chat template" in failure(["chat", "-m", str(tmp_path)], capsys)
    assert run(["generate", "-m", str(tmp_path), "-p", "Once upon a time", "--max-tokens", "2", "--quiet"]) == 0


class Terminal:
    """A `lily` command on a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        self.master, slave = pty.openpty()
        self.process = lily_process(*args, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, reached: Callable[[str], bool]) -> str:
        """Everything shown since the last call, as soon as it is ``reached``."""
        end = time.monotonic() + 60
        while not reached(self.shown):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 4096).decode()
        shown, self.shown = self.shown, ""
        return shown


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*args: str) -> Terminal:
        started.append(Terminal(*args))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


def test_an_interrupt_stops_the_reply_and_not_the_chat(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", "--seed", "1", *NO_END)
    t.until(lambda s: s.endswith("> "))
    t.type("Tell me a story.\n")
    t.until(lambda s: len(s) > 60)
    t.process.send_signal(signal.SIGINT)
    assert "(stopped)" in t.until(lambda s: s.endswith("> "))
    t.type("/exit\n")
    assert t.process.wait(60) == 0


def test_control_d_and_an_interrupt_leave_the_chat(terminal: Callable[..., Terminal]) -> None:
    first, second = terminal("chat"), terminal("chat")
    first.until(lambda s: s.endswith("> "))
    first.type("\x04")
    assert first.process.wait(60) == 0
    second.until(lambda s: s.endswith("> "))
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(60) == 130


def test_lines_pasted_together_are_one_message(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", "--seed", "1", "--max-tokens", "3")
    t.until(lambda s: s.endswith("> "))
    t.type("What does this do?\n/help\n")
    assert "forget" not in t.until(lambda s: "(cut off" in s and s.endswith("> "))
    t.type("/help\n")
    assert "forget" in t.until(lambda s: s.endswith("> "))


def test_a_second_interrupt_breaks_in() -> None:
    cancelled: list[bool] = []
    with _interrupts(lambda: cancelled.append(True)):
        signal.raise_signal(signal.SIGINT)
        assert cancelled == [True]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert cancelled == [True]
