# SPDX-License-Identifier: Apache-2.0
"""``lily chat`` from a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import NO_END, failure, lily_process, python_process, usage_error
from paths import EMBEDDED
from waiting import PATIENCE

import lily
from lily.cli import run


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


Sent = list[list[dict[str, Any]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What reaches the engine of each turn; the replies are "ok". The first is the command's look at the template."""
    sent: Sent = []

    def render(self: lily.Engine, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        sent.append([dict(message) for message in messages])
        return [1]

    def request(self: lily.Engine, prompt: list[int], sampling: dict[str, Any], *_: Any) -> Any:
        return lambda control: (lily.StreamChunk(text) for text in ("o", "k"))

    monkeypatch.setattr("lily.Engine.render_chat", render)
    monkeypatch.setattr("lily.Engine.request", request)
    return sent


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


OK = {"role": "assistant", "content": "ok"}


def test_chat_commands(sent: Sent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped("a\nb\n/reset\nc\n/system S\nd\n/help\n/exit\ne\n", monkeypatch)
    assert run(["chat"]) == 0
    system = {"role": "system", "content": "S"}
    assert sent[1:] == [[user("a")], [user("a"), OK, user("b")], [user("c")], [system, user("d")]]
    out, err = capsys.readouterr()
    assert out == "ok\n" * 4
    assert "/reset" in err


def test_only_known_words_are_commands(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = ["/* comment */ int main() {}", "/usr/bin/env: what is it?", "/what", "/help me", "/", " /help"]
    piped("\n/reset\n".join([*messages, "//help", "///"]), monkeypatch)
    assert run(["chat"]) == 0
    assert [turn[-1]["content"] for turn in sent[1:]] == [*messages[:-1], "/help", "//"]


def test_the_system_prompt_can_be_seen_without_losing_anything(
    sent: Sent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("/system\n/system Be brief.\na\n/system\nb\n/system -\nc\n", monkeypatch)
    assert run(["chat"]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert sent[1:] == [[system, user("a")], [system, user("a"), OK, user("b")], [user("c")]]
    err = capsys.readouterr().err
    assert "There is no system prompt.\n" in err
    assert "The system prompt: Be brief.\n" in err


def test_another_reply_takes_the_place_of_the_last_one(
    sent: Sent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("a\nb\n/regen\n/regen\nc\n", monkeypatch)
    assert run(["chat"]) == 0
    turn = [user("a"), OK, user("b")]
    assert sent[2:] == [turn, turn, turn, [*turn, OK, user("c")]]
    piped("/regen\n", monkeypatch)
    capsys.readouterr()
    assert "there is none yet" in usage_error(["chat", "--quiet"], capsys)


def test_another_reply_has_another_seed_and_the_same_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    request = lily.Engine.request

    def watched(self: lily.Engine, prompt: list[int], sampling: dict[str, Any], *rest: Any) -> Any:
        seeds.append(sampling["seed"])
        return request(self, prompt, sampling, *rest)

    monkeypatch.setattr("lily.Engine.request", watched)
    piped("a\n/regen\n/regen\nb\n", monkeypatch)
    assert run(["chat", "--seed", str((1 << 64) - 1), "--max-tokens", "1"]) == 0
    assert seeds == [(1 << 64) - 1, 0, 1, (1 << 64) - 1]


def test_a_reply_that_fails_leaves_the_old_one(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    piped("a\n/regen\nb\n", monkeypatch)
    monkeypatch.setattr("lily.Engine.request", replies := Replies(["ok", None, "ok"]))
    assert run(["chat"]) == 0
    assert replies.left == []
    assert sent[1:] == [[user("a")], [user("a")], [user("a"), OK, user("b")]]


class Replies:
    """Stands for Engine.request: gives these replies one after the other; None is cancelled before it begins."""

    def __init__(self, left: list[str | None]) -> None:
        self.left = left

    def __call__(self, *_: Any) -> Any:
        text = self.left.pop(0)
        return lambda control: (lily.StreamChunk(each) for each in ([] if text is None else [text]))


def test_a_file_stands_before_the_next_message_and_the_conversation_goes_into_one(
    sent: Sent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_bytes("Ein Kübel".encode())
    saved = tmp_path / "talk.json"
    piped(f"/read {tmp_path}/notes.txt\nWhat is it?\nAnd?\n/save {saved}\n", monkeypatch)
    assert run(["chat"]) == 0
    first = user("Ein Kübel\nWhat is it?")
    assert sent[1:] == [[first], [first, OK, user("And?")]]
    assert json.loads(saved.read_text(encoding="utf-8")) == [first, OK, user("And?"), OK]
    assert "9 characters" in capsys.readouterr().err
    for line, words in ((f"/save {saved}", "exists"), ("/read /no/such/file", "no such file"), ("/save", "name")):
        piped(f"{line}\n", monkeypatch)
        assert words in usage_error(["chat", "--quiet"], capsys).lower()


def test_an_interrupt_before_the_reply_begins_stops_the_reply_and_not_the_chat(
    sent: Sent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C straight after Enter, or while a long message is made into tokens."""
    render = lily.Engine.render_chat

    def interrupted(self: lily.Engine, messages: list[dict[str, Any]], **rest: Any) -> list[int]:
        if messages == [user("a")]:
            signal.raise_signal(signal.SIGINT)
        return render(self, messages, **rest)

    def request(self: lily.Engine, prompt: list[int], sampling: dict[str, Any], *_: Any) -> Any:
        return lambda control: (lily.StreamChunk("ok") for _ in range(1) if not control.cancelled)

    monkeypatch.setattr("lily.Engine.render_chat", interrupted)
    monkeypatch.setattr("lily.Engine.request", request)
    piped("a\nb\n", monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    assert run(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "\nok\n"
    assert "(stopped)" in err
    assert sent[1:] == [[user("a")], [user("b")]]
    assert signal.getsignal(signal.SIGINT) is before


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
    """A ``lily`` command, or what ``start`` starts, on a pseudo-terminal."""

    def __init__(
        self, *args: str, start: Callable[..., subprocess.Popen[bytes]] = lily_process, columns: int = 200, **env: str
    ) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (50, columns))
        self.process = start(*args, stdin=slave, stdout=slave, stderr=slave, environment=env)
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_at_prompt(self) -> None:
        """Once the process waits for a key: Python's line editor misses a signal that comes just before."""
        while self._state() != "S":
            time.sleep(0)
        self.interrupt()

    def _state(self) -> str:
        """R: it runs; S: it waits."""
        status = Path(f"/proc/{self.process.pid}/stat")
        if status.exists():
            return status.read_text().rpartition(") ")[2][0]
        return subprocess.check_output(["ps", "-o", "state=", "-p", str(self.process.pid)], text=True)[0]

    def until(self, reached: Callable[[str], bool]) -> str:
        """Everything shown since the last call, as soon as it is ``reached``."""
        end = time.monotonic() + PATIENCE
        while not reached(self.shown):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 4096).decode()
        shown, self.shown = self.shown, ""
        return shown

    def until_asked(self) -> str:
        return self.until(lambda s: s.endswith("> "))


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*args: str, **options: Any) -> Terminal:
        started.append(Terminal(*args, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


def test_an_interrupt_stops_the_reply_and_not_the_chat(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", "--seed", "1", *NO_END)
    t.until_asked()
    t.type("Tell me a story.\n")
    t.until(lambda s: len(s) > 60)
    t.interrupt()
    assert "(stopped)" in t.until_asked()
    t.type("/exit\n")
    assert t.process.wait(PATIENCE) == 0


def test_control_d_and_two_interrupts_leave_the_chat(terminal: Callable[..., Terminal]) -> None:
    first, second = terminal("chat"), terminal("chat")
    first.until_asked()
    first.type("\x04")
    assert first.process.wait(PATIENCE) == 0
    second.until_asked()
    second.interrupt_at_prompt()
    assert "Ctrl-C again" in second.until_asked()
    second.interrupt_at_prompt()
    assert second.process.wait(PATIENCE) == 130


def test_an_interrupt_clears_a_half_typed_line(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat")
    t.until_asked()
    for _ in range(2):  # also right after another one
        t.type("half a message")
        t.until(lambda s: s.endswith("half a message"))
        t.interrupt_at_prompt()
        assert "again" not in t.until_asked()
    t.type("/help\n")
    assert "forget" in t.until_asked()


def test_lines_pasted_together_are_one_message_and_one_entry_of_the_history(terminal: Callable[..., Terminal]) -> None:
    t = terminal("chat", "--seed", "1", "--max-tokens", "3")
    t.until_asked()
    t.type("\x1b[200~What does this do?\n/help\x1b[201~\n")
    assert "forget" not in t.until(lambda s: "(cut off" in s and s.endswith("> "))
    t.type("\x1b[A")  # Up
    t.until(lambda s: "What does this do?" in s and s.endswith("/help"))
    t.interrupt_at_prompt()
    t.until_asked()
    t.type("/help\n")
    assert "forget" in t.until_asked()


def test_lines_typed_while_a_reply_is_written_are_not_shown_in_it_and_stay_apart(
    terminal: Callable[..., Terminal],
) -> None:
    t = terminal("chat", "--seed", "1", "--max-tokens", "100", *NO_END)
    t.until_asked()
    t.type("Tell me a story.\n")
    t.until(lambda s: len(s) > 60)
    t.type("QQ one\nQQ two\n")
    first, second, third, _ = t.until(lambda s: s.count("(cut off") == 3).split("(cut off")
    assert "QQ" not in first
    assert "> QQ one" in second
    assert second.count("QQ") == 1
    assert "> QQ two" in third
    assert third.count("QQ") == 1


KEYBOARD = """
from lily.cli.keyboard import Keyboard
keyboard = Keyboard()
keyboard.marks_pastes = False
for _ in range(3):
    print(repr(keyboard.read()))
"""


def test_lines_that_come_at_once_are_one_message_where_pastes_are_not_marked(
    terminal: Callable[..., Terminal],
) -> None:
    t = terminal("-c", KEYBOARD, start=python_process)
    t.until_asked()
    t.type("one\n\ntwo\n")
    assert "'one\\n\\ntwo'" in t.until(lambda s: "'" in s and s.endswith("> "))
    t.type("\x1b[A")
    t.until(lambda s: "one" in s and s.endswith("two"))
    t.type("\n")
    assert "'one\\n\\ntwo'" in t.until(lambda s: "'" in s and s.endswith("> "))


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def test_text_is_utf_8_whatever_the_locale(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    t = terminal("chat", "--max-tokens", "1", "--system", "déjà vu", **ASCII)
    t.until_asked()
    t.type("café\n")
    assert "error" not in t.until(lambda s: "(cut off" in s and s.endswith("> "))
    t.type(f"/save {tmp_path}/talk\n")
    t.until_asked()
    system, message, _ = json.loads((tmp_path / "talk").read_text(encoding="utf-8"))
    assert (system["content"], message["content"]) == ("déjà vu", "café")
    flags = ["--system", "café", "--stop", "é", "--prefill-response", "à", "--max-tokens", "1", "--quiet"]
    with lily_process("generate", "café", *flags, environment=ASCII) as process:
        assert process.wait(60) == 0


def test_progress_fits_the_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """A model of a long name on a narrow terminal: what is drawn over itself never wraps."""
    folder = tmp_path / ("long-name-" * 8)
    folder.symlink_to(EMBEDDED)
    shown = terminal("chat", "-m", str(folder), "--max-context", "64", columns=50).until_asked()
    pictures = [part.partition("\x1b[K")[0] for part in shown.split("\r") if "\x1b[K" in part]
    assert "loading " in pictures[0]
    assert max(map(len, pictures)) < 50
