# SPDX-License-Identifier: Apache-2.0
"""The command line: what goes to which stream, what reaches the engine, and how each command ends.

Most tests run commands inside this process; where a signal or a closed pipe matters, in one of their own.
Not handled: `chat` (test_cli_chat.py), `plan` (test_plan_command.py), the installed script (test_packaging.py).
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import NO_END, failure, lily_process, usage_error
from engine_harness import device_buffers, memory_when_full
from paths import DATA, EMBEDDED

import lily
from lily.cli import run
from lily.cli.console import Progress
from lily.cli.prompts import reply_start
from lily.errors import LilyError

TEMPLATE_START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Fake:
    """An engine that computes nothing: it notes how it is opened and asked, and replies `a b`."""

    opened: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None
    prompt = ""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        options.pop("progress")
        Fake.opened = {"model": model, **options}
        self.tokenizer = lily.engine.Tokenizer.from_dir(EMBEDDED, 4096)
        self.chat_template = lily.engine.ChatTemplate.from_dir(EMBEDDED)
        self.info = {"model": "fake", "path": "/fake", "revision": None, "max_context": 99, "device": {"name": "cpu"}}

    render_chat = lily.Engine.render_chat

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, tokens: list[int], **sampling: Any) -> lily.Stream:
        Fake.prompt, Fake.asked = self.tokenizer.decode(tokens), sampling
        return lily.Stream(lambda control: self.pieces())

    def pieces(self) -> Iterator[lily.StreamChunk]:
        timings = lily.Timings(2.0, 3.0, 5.0, 7.0)
        done = lily.Completion("a b", [1, 2], "stop", 10, 2, 4, None, timings)
        yield lily.StreamChunk("a ")
        yield lily.StreamChunk("b", finish_reason="stop", completion=done)


class Raw(io.RawIOBase):
    """The bottom of a text stream, where bytes have left the program's buffers."""

    def __init__(self, sink: io.BytesIO) -> None:
        self.sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.sink.write(data)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.opened = Fake.asked = None
    monkeypatch.setattr("lily.engine.Engine", Fake)
    return Fake


# ---- starting
def test_version_and_help_load_neither_numpy_nor_the_engine() -> None:
    code = (
        "import sys, lily.cli; lily.cli.run(['--version']); lily.cli.run(['generate', '--help']);"
        "loaded = {'numpy', 'tokenizers', 'jinja2', 'lily.engine', 'lily.kernels'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"lily {lily.__version__}\nUsage: lily generate ")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("generate", "chat", "plan", "info", "pull"))


# ---- generate: what reaches the engine
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temp", "0"], {"temperature": 0.0}),
        (["--top-p", "0.5", "--top-k", "3", "--min-p", "0.1"], {"top_p": 0.5, "top_k": 3, "min_p": 0.1}),
        (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
        (["--presence-penalty", "1"], {"presence_penalty": 1.0}),
        (["--frequency-penalty", "-1"], {"frequency_penalty": -1.0}),
        (["--logit-bias", "5=-1.5", "--logit-bias", "7=2"], {"logit_bias": {5: -1.5, 7: 2.0}}),
        (["--logit-bias", '{"5": -1.5, "7": 2}'], {"logit_bias": {5: -1.5, 7: 2.0}}),
        (["--seed", "9"], {"seed": 9}),
        (["--stop", "x", "--stop", "y z"], {"stop": ("x", "y z")}),
        (["--max-tokens", "3"], {"max_tokens": 3}),
        (["--logprobs", "2", "--json"], {"logprobs": 2}),
        (["--extra-eos-token", "<|im_end|>"], {"stop_token_ids": [4066]}),
        ([], {"max_tokens": 256, "temperature": None, "top_p": None, "top_k": None, "stop_token_ids": []}),
    ],
)
def test_a_sampling_flag_reaches_the_engine(fake: type[Fake], flags: list[str], expected: dict[str, Any]) -> None:
    assert run(["generate", "-p", "Hi", "--quiet", *flags]) == 0
    assert fake.asked is not None
    assert {name: fake.asked[name] for name in expected} == expected


def test_engine_flags_reach_the_engine(fake: type[Fake]) -> None:
    flags = ["-m", "a/b@c", "--max-context", "77", "--device", "cpu", "--threads", "3"]
    assert run(["generate", "-p", "Hi", *flags, "--ablate", "overlap,handoff", "--ablate", "overlap"]) == 0
    assert fake.opened == {
        "model": "a/b@c", "max_context": 77, "device": "cpu", "threads": 3, "ablate": ("overlap", "handoff"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ([], TEMPLATE_START + "<think>\n"),
        (["--ignore-chat-template"], "Hi"),
        (["--system-prompt", "Be brief."], "<|im_start|>system\nBe brief.<|im_end|>\n" + TEMPLATE_START + "<think>\n"),
        (["--chat-template-config", '{"enable_thinking": false}'], TEMPLATE_START + "<think>\n\n</think>\n\n"),
        (["--prefill-response", "Sure"], TEMPLATE_START + "<think>\n\n</think>\n\nSure"),
        (["--prefill-response", "<think>\nHm"], TEMPLATE_START + "<think>\nHm"),
        (
            ["--prefill-response", "Sure", "--chat-template-config", '{"enable_thinking": false}'],
            TEMPLATE_START + "<think>\n\n</think>\n\nSure",
        ),
    ],
)
def test_the_prompt_is_put_into_the_chat_template(fake: type[Fake], flags: list[str], prompt: str) -> None:
    assert run(["generate", "-p", "Hi", "--quiet", *flags]) == 0
    assert fake.prompt == prompt


def test_a_prefilled_reply_with_its_own_reasoning_stays_as_it_is() -> None:
    assert reply_start("<|im_start|>assistant\n<think>\n", "Hm\n</think>\n\nYes") == "Hm\n</think>\n\nYes"


def test_a_prompt_is_taken_literally_and_may_come_from_standard_input(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["generate", "-p", r"a\n", "--ignore-chat-template", "--quiet"]) == 0
    assert fake.prompt == "a\\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("zwei\nZeilen é\n".encode()), encoding="ascii"))
    assert run(["generate", "-p", "-", "--ignore-chat-template", "--quiet"]) == 0
    assert fake.prompt == "zwei\nZeilen é\n"


def test_without_a_model_one_line_says_how_to_get_the_real_one(
    fake: type[Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-p", "Hi"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert "embedded" in first
    assert "lily pull mlx-community/Qwen3.6-35B-A3B-4bit" in first
    assert run(["generate", "-p", "Hi", "-m", "x"]) == 0
    assert "embedded" not in capsys.readouterr().err


# ---- generate: what comes out
def test_text_goes_to_standard_output_and_the_rest_to_standard_error(
    fake: type[Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "-p", "Hi", "-m", "x"]) == 0
    out, err = capsys.readouterr()
    assert out == "a b"
    lines = err.splitlines()
    assert lines[1] == "Prompt: 10 tokens (4 cached), 5.000 tokens-per-sec"
    assert lines[2] == "Generation: 2 tokens, 7.000 tokens-per-sec"
    assert lines[3].startswith("Peak memory: ")
    assert run(["generate", "-p", "Hi", "--quiet"]) == 0
    assert capsys.readouterr() == ("a b", "")


def test_text_is_written_as_it_comes(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    seen: list[bytes] = []
    pieces = Fake.pieces

    def watched(self: Fake) -> Iterator[lily.StreamChunk]:
        for chunk in pieces(self):
            seen.append(sink.getvalue())
            yield chunk

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Raw(sink)), encoding="utf-8"))
    monkeypatch.setattr(Fake, "pieces", watched)
    assert run(["generate", "-p", "Hi", "--quiet"]) == 0
    assert [*seen, sink.getvalue()] == [b"", b"a ", b"a b"]


def test_generate_writes_what_the_engine_replies(capsys: pytest.CaptureFixture[str]) -> None:
    with lily.Engine() as engine:
        expected = engine.chat([{"role": "user", "content": "Once upon a time"}], seed=1, max_tokens=24)
    assert len(expected.text) > 40
    assert run(["generate", "-p", "Once upon a time", "--seed", "1", "--max-tokens", "24", "--quiet"]) == 0
    assert capsys.readouterr() == (expected.text, "")


def test_json_holds_the_reply_and_a_seed_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "-p", "Tell me a story.", "--max-tokens", "8", "--quiet"]
    assert run([*base, "--json", "--logprobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert run([*base, "--seed", str(result["seed"])]) == 0
    assert capsys.readouterr().out == result["text"]
    assert len(result["token_ids"]) == result["completion_tokens"] == len(result["logprobs"]) == 8
    assert result["finish_reason"] == "length"
    assert result["model"]["model"] == "lily-tiny"
    assert result["timings"]["generation_tokens_per_second"] > 0
    entry = result["logprobs"][0]
    assert [top["logprob"] for top in entry["top"]] == sorted((top["logprob"] for top in entry["top"]), reverse=True)
    assert len(entry["top"]) == 2
    assert "".join(e["token"] for e in result["logprobs"]) == result["text"]


def test_logprobs_without_json_are_a_line_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-p", "Hi", "--max-tokens", "3", "--temp", "0", "--logprobs", "1", "--quiet"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in err.splitlines()]
    assert len(lines) == 3
    assert all(len(line) == 2 and line[0] == line[1] for line in lines)  # greedy: the token is the likeliest
    assert "".join(eval(line[0].rsplit(" ", 1)[0]) for line in lines) == out


# ---- bad input
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--prompt"]),
        (["-p", ""], ["prompt is empty"]),
        (["-p", "a\udcffb"], ["UTF-8", "0xff"]),
        (["-p", "x", "--max-tokens", "0"], ["--max-tokens is 0", "from 1"]),
        (["-p", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["-p", "x", "--temp", "-1"], ["--temp is -1", "0 to 100"]),
        (["-p", "x", "--temp", "nan"], ["--temp is nan"]),
        (["-p", "x", "--top-p", "0"], ["--top-p is 0", "above 0"]),
        (["-p", "x", "--top-k", "-2"], ["--top-k is -2"]),
        (["-p", "x", "--min-p", "2"], ["--min-p is 2"]),
        (["-p", "x", "--repetition-penalty", "0"], ["--repetition-penalty is 0"]),
        (["-p", "x", "--seed", "-1"], ["--seed is -1"]),
        (["-p", "x", "--stop", ""], ["--stop"]),
        (["-p", "x", "--logprobs", "21"], ["--logprobs is 21", "20"]),
        (["-p", "x", "--logit-bias", "a=1"], ["--logit-bias", "ID=BIAS"]),
        (["-p", "x", "--logit-bias", "5"], ["--logit-bias", "ID=BIAS"]),
        (["-p", "x", "--logit-bias", "5=nan"], ["--logit-bias", "finite"]),
        (["-p", "x", "--logit-bias", "{5"], ["--logit-bias", "JSON"]),
        (["-p", "x", "--chat-template-config", "[1]"], ["--chat-template-config", "object"]),
        (["-p", "x", "--device", "tpu"], ["--device", "tpu", "metal"]),
        (["-p", "x", "--threads", "0"], ["--threads"]),
        (["-p", "x", "--max-context", "0"], ["--max-context"]),
        (["-p", "x", "--ablate", "magic"], ["magic", "overlap"]),
        (["-p", "x", "-m", ""], ["--model", "empty"]),
        (["-p", "x", "--ignore-chat-template", "--system-prompt", "y"], ["--ignore-chat-template"]),
        (["-p", "x", "--temperature", "1"], ["--temperature"]),
        (["-p", "x", "--extra-eos-token", ""], ["--extra-eos-token"]),
    ],
)
def test_a_bad_flag_is_named_before_anything_is_loaded(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    message = usage_error(["generate", *flags], capsys)
    assert all(word in message for word in words)
    assert fake.opened is None


@pytest.mark.parametrize("data", [b"", b"abc\xff"])
def test_a_bad_prompt_on_standard_input_is_refused(
    data: bytes, fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert "standard input" in usage_error(["generate", "-p", "-"], capsys)


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "paint" in usage_error(["paint"], capsys)


def test_an_end_token_that_is_several_tokens_is_refused(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(["generate", "-p", "x", "--extra-eos-token", "Once upon a time", "--quiet"], capsys)
    assert "Once upon a time" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-m", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
        (["-m", str(DATA)], ["config.json"]),
        (["-m", "some-org/some-model"], ["some-org/some-model", "lily pull some-org/some-model"]),
        (["--device", "cuda"], ["cuda", "cpu"]),
        (["--max-context", "5"], ["5", "tokens"]),
        (["--max-context", "99999"], ["99999", "32768"]),
        (["--chat-template-config", '{"messages": []}'], ["messages"]),
        (["--logit-bias", "4095=1"], ["4095"]),
    ],
)
def test_what_cannot_be_done_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str],
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    message = failure(["generate", "-p", "What is your name?", *flags], capsys)
    assert all(word in message for word in words)


def test_a_bug_is_one_line_unless_verbose(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Fake, "stream", broken)
    message = failure(["generate", "-p", "x"], capsys)
    assert "bug" in message
    assert "ZeroDivisionError: oops" in message
    with pytest.raises(ZeroDivisionError):
        run(["generate", "-p", "x", "--verbose"])


# ---- streams that fail
def full_device() -> Any:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    return open("/dev/full", "wb")


@pytest.mark.parametrize("args", [["plan"], ["generate", "--help"]])
def test_an_unwritable_standard_output_is_an_error(args: list[str]) -> None:
    with full_device() as full, lily_process(*args, stdout=full) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.decode().splitlines() == ["lily: error: standard output cannot be written: No space left on device"]


def test_a_closed_standard_output_is_an_error() -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m lily plan >&-"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "lily: error: standard output cannot be written: it is closed\n")


def test_a_reader_that_goes_away_ends_the_reply_quietly() -> None:
    flags = ["--quiet", "--max-tokens", "20000", "--seed", "1", *NO_END]
    with lily_process("generate", "-p", "Hi", *flags) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


def test_an_interrupt_ends_generate_with_130() -> None:
    flags = ["--quiet", "--max-tokens", "20000", "--seed", "1", *NO_END]
    with lily_process("generate", "-p", "Hi", *flags) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


# ---- info
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
    with device_buffers() as made, lily.Engine(max_context=1000) as engine:
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


def test_info_says_what_is_broken_and_shows_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "-m", "/no/such/folder"]) == 1
    out, err = capsys.readouterr()
    assert "device: cpu" in out
    assert err == "lily: error: '/no/such/folder': no such folder\n"
    assert run(["info", "--device", "cuda"]) == 1
    out, err = capsys.readouterr()
    assert "model: lily-tiny" in out
    assert "cuda" in err
    assert run(["info", "--json", "--max-context", "40000"]) == 1
    out, err = capsys.readouterr()
    assert "40000" in json.loads(out)["context"]["error"]
    assert "40000" in err


# ---- pull
def test_pull_writes_the_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "lily.checkpoint.hub.pull", lambda spec, progress: calls.append((spec, progress)) or Path("/cache/x")
    )
    monkeypatch.setattr("lily.cli.pull.is_terminal", lambda stream: stream is sys.stderr)
    assert run(["pull", "a/b@main"]) == 0
    out, err = capsys.readouterr()
    assert out == "/cache/x\n"
    assert "lily generate -m a/b@main" in err
    assert run(["pull", "a/b", "--quiet"]) == 0
    assert capsys.readouterr() == ("/cache/x\n", "")
    assert calls == [("a/b@main", True), ("a/b", False)]


def test_pull_names_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_disk(*_: object, **__: object) -> None:
        raise LilyError("a/b: 20.4 GB to download, but / has 1.0 GB free")

    monkeypatch.setattr("lily.checkpoint.hub.pull", no_disk)
    assert "20.4 GB" in failure(["pull", "a/b"], capsys)
    assert "ORG/NAME" in usage_error(["pull", "not-a-repository"], capsys)


# ---- progress
def test_the_progress_bar_ends_full_and_is_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress("loading x")
    bar(0, 2_000_000_000)
    bar(1, 2_000_000_000)  # too soon to be shown
    bar(2_000_000_000, 2_000_000_000)
    bar.clear()
    lines = capsys.readouterr().err.split("\r")
    assert lines[1:3] == [f"loading x [{' ' * 30}] 0.00 of 2.00 GB", f"loading x [{'#' * 30}] 2.00 of 2.00 GB"]
    assert lines[3] == "\x1b[K"
