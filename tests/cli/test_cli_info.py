# SPDX-License-Identifier: Apache-2.0
"""``lily info``: what it says of model, device and memory, and of what is broken."""

from __future__ import annotations

import json

import pytest
from engine_harness import device_buffers, memory_when_full

import lily
from lily.cli import run
from lily.device import kinds
from lily.device.description import described, rows


def test_info_reports_the_embedded_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("lily.checkpoint.checkpoint.Checkpoint.read_into", read)
    monkeypatch.setattr("lily.checkpoint.checkpoint.Checkpoint.read", read)
    assert run(["info", "--json", "--max-context", "1000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lily"] == lily.__version__
    model, context = report["model"], report["context"]
    assert (model["name"], model["layers"], model["text_tensors"]) == ("lily-tiny", 8, 357)
    assert model["quantization"] == {"4 bits, groups of 64": 88, "8 bits, groups of 64": 16}
    assert context["max_context"] == 1000
    assert context["memory"]["kv"] == 1000 * 2 * 2 * 2 * 256 * 2  # 2 layers, K and V, 2 heads of 256, bf16
    assert report["sampling_defaults"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert report["device"]["name"] == lily.device.device.choose_device("auto")


def test_info_agrees_with_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json", "--max-context", "1000"]) == 0
    report = json.loads(capsys.readouterr().out)
    with device_buffers() as made, lily.Engine(max_context=1000, sequences=1) as engine:
        info = engine.info
        assert report["context"]["memory"]["total"] == memory_when_full(engine, made)
    assert report["context"]["memory"] == info["memory"]
    assert report["device"] == info["device"]
    assert report["sampling_defaults"] | info["sampling_defaults"] == report["sampling_defaults"]


def test_info_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    out = capsys.readouterr().out
    assert f"lily {lily.__version__}" in out
    assert "model: lily-tiny (embedded)" in out
    assert "4096 bytes each" in out
    shown = {label: words for label, _, words in (line.strip().partition("  ") for line in out.splitlines())}
    assert shown["memory"].strip().endswith(" GB")
    assert shown["usable sets"].strip().endswith("portable")
    assert "null" not in out


def test_a_device_is_described_in_lists_and_units() -> None:
    info = {
        "name": "metal", "isas": "a,b", "null": 0, "memory": 25_276_502_016, "threadgroup_memory": 32768,
        "library_s": "0.250", "slice_ms": 20, "pipelines": 3, "unset": "",
    }  # fmt: skip
    data = described(info)
    assert data == {
        "isas": ["a", "b"], "memory": 25_276_502_016, "threadgroup_memory": 32768, "library_s": 0.25, "slice_ms": 20,
        "pipelines": 3, "unset": "",
    }  # fmt: skip
    assert rows(data) == [
        "usable sets         a, b",
        "memory              25.28 GB",
        "threadgroup memory  32.8 kB",
        "library             0.25 s",
        "slice               20 ms",
        "pipelines           3",
    ]


def test_info_says_what_is_broken_and_shows_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["info", "-m", "/no/such/folder"]) == 1
    out, err = capsys.readouterr()
    assert "device: cpu\n" in out
    assert err == "lily: error: '/no/such/folder': no such folder\n"
    monkeypatch.delitem(kinds.LIBRARIES, "metal", raising=False)
    assert run(["info", "--device", "metal"]) == 1
    out, err = capsys.readouterr()
    assert "model: lily-tiny" in out
    assert "context: unknown" in out
    assert "metal" in err
    assert err.count("lily: error: ") == 1  # for one cause
    assert run(["info", "--json", "--max-context", "40000"]) == 1
    out, err = capsys.readouterr()
    assert "40000" in json.loads(out)["context"]["error"]
    assert "40000" in err
