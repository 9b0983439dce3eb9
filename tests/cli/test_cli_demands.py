# SPDX-License-Identifier: Apache-2.0
"""Demands on the command line: a bound on reasoning, a schema from a file, and files that hold none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_harness import usage_error

from lily.cli import run
from lily.text.guide import CLOSING

ASK = ["generate", "-p", "Hello!", "--temp", "0", "--max-tokens", "80", "--json"]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}


def test_the_reasoning_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--reasoning-budget", "2"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["reasoning"].endswith(CLOSING.strip())
    assert reply["text"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_answer_is_of_the_schema(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    (tmp_path / "typed").write_text("Hello!\\n")
    with (tmp_path / "typed").open() as typed:
        monkeypatch.setattr("sys.stdin", typed)
        words = ["generate", "-p", "Hello!"] if command == "generate" else ["chat"]
        assert run([*words, "--temp", "0", "--no-thinking", "--json-schema", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == {"n": 7}


@pytest.mark.parametrize(("text", "said"), [("{", "not valid JSON"), ("[]", "no JSON object")])
def test_a_file_without_a_schema_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(text)
    message = usage_error([*ASK, "--json-schema", str(file)], capsys)
    assert said in message
    assert str(file) in message


def test_a_prompt_that_is_no_chat_has_no_demands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--reasoning-budget" in usage_error([*ASK, "--ignore-chat-template", "--reasoning-budget", "2"], capsys)
