# SPDX-License-Identifier: Apache-2.0
"""Reasoning on the command line: dimmed on a terminal, left out elsewhere, and as the flags say."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from cli_harness import usage_error

import lily
from lily.cli import run
from lily.cli.console import Console
from lily.cli.shown import ShownReply

CHUNKS = [("", "It is"), ("", " odd.\n"), ("", ""), ("Yes", ""), (".", "")]  # (text, reasoning)
ARGS = ["generate", "-p", "Hello!", "--temp", "0", "--max-tokens", "60"]


class Screen(io.StringIO):
    """Standard output on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Screen]:
    """Makes standard output a terminal, which is not before the test runs: pytest has its own until then."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make() -> Screen:
        monkeypatch.setattr("sys.stdout", screen := Screen())
        return screen

    return make


def show(reasoning: bool | None, chunks: list[tuple[str, str]] = CHUNKS) -> None:
    shown = ShownReply(Console(), reasoning)
    for text, thought in chunks:
        shown.chunk(lily.StreamChunk(text, reasoning=thought))
    shown.end()


@pytest.fixture(scope="module")
def expected() -> lily.Completion:
    with lily.Engine() as engine:
        reply = engine.chat([{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=60)
    assert reply.reasoning
    assert reply.text
    return reply


@pytest.mark.parametrize("reasoning", [None, True])
def test_reasoning_is_dimmed_on_a_terminal(screen: Callable[[], Screen], reasoning: bool | None) -> None:
    """Every piece by itself, so that a reply that breaks off leaves the terminal as it was."""
    out = screen()
    show(reasoning)
    assert out.getvalue() == "\x1b[2mIt is\x1b[22m\x1b[2m odd.\n\x1b[22m\n\nYes.\n"


def test_reasoning_stands_between_tags_where_colours_are_refused(
    screen: Callable[[], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = screen()
    show(None)
    assert out.getvalue() == "<think>\nIt is odd.\n\n</think>\n\nYes.\n"


def test_hidden_reasoning_leaves_no_trace_on_a_terminal(screen: Callable[[], Screen]) -> None:
    out = screen()
    show(False)
    assert out.getvalue() == "Yes.\n"


@pytest.mark.parametrize(
    ("reasoning", "begins"), [(None, ""), (False, ""), (True, "<think>\nIt is odd.\n\n</think>\n\n")]
)
def test_what_a_pipe_gets(reasoning: bool | None, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(reasoning)
    assert capsys.readouterr().out == begins + "Yes.\n"


@pytest.mark.parametrize(
    ("chunks", "written"),
    [([], "\n"), ([("a\n", "")], "a\n"), ([("a", ""), ("", "")], "a\n"), ([("", "thought")], "<think>\nthought\n")],
    ids=["nothing", "ended", "open", "reasoning alone"],
)
def test_a_shown_reply_ends_with_a_line_break(
    chunks: list[tuple[str, str]], written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(True, chunks)
    assert capsys.readouterr().out == written


def test_generate_writes_reasoning_when_it_is_asked_to(
    capsys: pytest.CaptureFixture[str], expected: lily.Completion
) -> None:
    assert run([*ARGS, "--quiet", "--show-reasoning"]) == 0
    assert capsys.readouterr().out == f"<think>\n{expected.reasoning}\n</think>\n\n{expected.text}\n"
    assert run([*ARGS, "--quiet"]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_json_has_reasoning_and_calls_beside_the_text(
    capsys: pytest.CaptureFixture[str], expected: lily.Completion
) -> None:
    assert run([*ARGS, "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["reasoning"], result["tool_calls"]) == (expected.text, expected.reasoning, [])


def test_no_thinking_asks_the_template_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGS, "--quiet", "--json", "--no-thinking"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reasoning"] is None
    with lily.Engine() as engine:
        hello: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
        thinking = {"enable_thinking": False}
        want = engine.chat(hello, template_kwargs=thinking, temperature=0, max_tokens=60)
    assert (result["text"], result["prompt_tokens"]) == (want.text, want.prompt_tokens)


def test_no_thinking_beside_what_contradicts_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    template = ["--chat-template-config", '{"enable_thinking": true}']
    assert "leave out one" in usage_error([*ARGS, "--no-thinking", *template], capsys)
    assert "--no-thinking" in usage_error([*ARGS, "--no-thinking", "--ignore-chat-template"], capsys)


def test_a_reply_cut_off_in_its_reasoning_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-p", "Hello!", "--temp", "0", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "(cut off after 3 tokens, in the reasoning; --max-tokens)" in err


def test_chat_from_a_pipe_shows_reasoning_when_it_is_asked_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, expected: lily.Completion
) -> None:
    flags = ["chat", "--temp", "0", "--quiet"]
    for more, begins in (([], ""), (["--show-reasoning"], f"<think>\n{expected.reasoning}\n</think>\n\n")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
        assert run([*flags, *more]) == 0
        assert capsys.readouterr().out == f"{begins}{expected.text}\n"
