# SPDX-License-Identifier: Apache-2.0
"""The commands on each device: ``--device`` reaches it, and what it writes is what the engine says.

Not handled: the commands themselves (test_cli.py).
"""

from __future__ import annotations

import json

import pytest
from engine_device import Target
from engine_harness import open_engine
from models import tiny_model

from lily.cli import run


def arguments() -> list[str]:
    return ["--max-context", "64", "--quiet", "-m", str(tiny_model())]


def test_generate_writes_what_the_engine_replies(device: Target, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", device.name, "-p", "Hello", "--ignore-chat-template", "--max-tokens", "4", "--seed", "3"]
    assert run(["generate", *flags, *arguments(), "--json", "--logprobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    with open_engine(tiny_model(), max_context=64) as engine:
        expected = engine.generate("Hello", max_tokens=4, seed=3, logprobs=1)
    assert result["token_ids"] == expected.token_ids
    assert result["text"] == expected.text


def test_an_ablation_by_name_runs(device: Target, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", device.name, "-p", "Hello", "--ignore-chat-template", "--max-tokens", "4", "--temp", "0"]
    texts = []
    for ablation in ([], ["--ablate", "overlap,handoff"]):
        assert run(["generate", *flags, *arguments(), *ablation]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_info_agrees_with_the_engine(device: Target, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json", "--device", device.name, "-m", str(tiny_model()), "--max-context", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["name"] == device.name
    with open_engine(tiny_model(), max_context=64) as engine:
        assert report["context"]["memory"] == engine.info["memory"]
