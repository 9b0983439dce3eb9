# SPDX-License-Identifier: Apache-2.0
"""The command line: what goes to which stream, what reaches the engine, and how each command ends.

Most tests run commands inside this process; where a signal or a closed pipe matters, in one of their own.
Not handled: ``chat``, ``info``, ``pull``, ``serve`` and progress bars (test_cli_*.py), ``plan`` (test_plan_command.py),
the installed script (test_packaging.py).
"""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli_harness import NO_END, failure, lily_process, usage_error
from paths import DATA, EMBEDDED
from waiting import PATIENCE

import lily
from lily.cli import run
from lily.device import kinds

TEMPLATE_START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Fake:
    """An engine that computes nothing: it notes how it is opened and asked, and replies ``a b``."""

    opened: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None
    prompt = ""
    texts: ClassVar[list[str]] = ["a ", "b"]
    reason: ClassVar[lily.streaming.FinishReason] = "stop"

    def __init__(self, model: str | None = None, **options: Any) -> None:
        options.pop("progress")
        Fake.opened = {"model": model, **options}
        self.tokenizer = lily.engine.Tokenizer.from_dir(EMBEDDED, 4096)
        self.chat_template = lily.engine.ChatTemplate.from_dir(EMBEDDED)
        self.info = {"model": "fake", "path": "/fake", "revision": None, "max_context": 99, "device": {"name": "cpu"}}
        self.info["notes"] = []

    render_chat = lily.Engine.render_chat

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, tokens: list[int], *, on_prompt: Any, **sampling: Any) -> lily.Stream:
        Fake.prompt, Fake.asked = self.tokenizer.decode(tokens), sampling
        return lily.Stream(lambda request: self.chunks())

    def chat(self, messages: list[dict[str, Any]], *, continuation: str, stream: bool, **rest: Any) -> lily.Stream:
        template = rest.pop("template_kwargs")
        return self.stream(self.render_chat(messages, template_kwargs=template, continuation=continuation), **rest)

    def chunks(self) -> Iterator[lily.StreamChunk]:
        timings = lily.Timings(2.0, 3.0, 5.0, 7.0)
        done = lily.Completion("".join(self.texts), [1, 2], self.reason, 10, 2, 4, None, timings, 9)
        for text in self.texts[:-1]:
            yield lily.StreamChunk(text)
        yield lily.StreamChunk(self.texts[-1], finish_reason=self.reason, completion=done)


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
        (["--temperature", "0.5", "-n", "4"], {"temperature": 0.5, "max_tokens": 4}),
        ([], {"max_tokens": None, "temperature": None, "top_p": None, "top_k": None, "stop_token_ids": []}),
    ],
)
def test_a_sampling_flag_reaches_the_engine(fake: type[Fake], flags: list[str], expected: dict[str, Any]) -> None:
    assert run(["generate", "-p", "Hi", "--quiet", *flags]) == 0
    assert fake.asked is not None
    assert {name: fake.asked[name] for name in expected} == expected


def test_engine_flags_reach_the_engine(fake: type[Fake]) -> None:
    flags = ["-m", "a/b@c", "--device", "cpu", "--ablate", "overlap,handoff", "--ablate", "overlap"]
    for names in (["--max-context", "77", "--threads", "3"], ["-c", "77", "-t", "3"]):
        assert run(["generate", "-p", "Hi", *flags, *names]) == 0
        assert fake.opened == {
            "model": "a/b@c", "max_context": 77, "device": "cpu", "threads": 3, "ablate": ("overlap", "handoff"),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ([], TEMPLATE_START + "<think>\n"),
        (["--ignore-chat-template"], "Hi"),
        (["--system", "Be brief."], "<|im_start|>system\nBe brief.<|im_end|>\n" + TEMPLATE_START + "<think>\n"),
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


def test_a_prompt_is_taken_literally_and_may_come_from_standard_input(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["generate", "-p", r"a\n", "--ignore-chat-template", "--quiet"]) == 0
    assert fake.prompt == "a\\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("zwei\nZeilen é\n".encode()), encoding="ascii"))
    assert run(["generate", "-p", "-", "--ignore-chat-template", "--quiet"]) == 0
    assert fake.prompt == "zwei\nZeilen é\n"


def test_a_prompt_is_an_argument_a_file_or_what_comes_through_a_pipe(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["--ignore-chat-template", "--quiet"]
    assert run(["generate", "an argument", *flags]) == 0
    assert fake.prompt == "an argument"
    (tmp_path / "prompt.txt").write_bytes("eine Datei é\n".encode())
    assert run(["generate", "-f", str(tmp_path / "prompt.txt"), *flags]) == 0
    assert fake.prompt == "eine Datei é\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a pipe")))
    assert run(["generate", *flags]) == 0
    assert fake.prompt == "a pipe"


def test_without_a_prompt_a_terminal_is_told_how_to_give_one(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lily.cli.prompts.is_terminal", lambda stream: True)
    assert all(way in usage_error(["generate"], capsys) for way in ("argument", "-p/--prompt", "-f", "pipe"))
    assert "more than one prompt" in usage_error(["generate", "a", "-p", "b"], capsys)
    assert "no such file" in usage_error(["generate", "-f", "/no/such/file"], capsys).lower()
    assert fake.opened is None


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
    assert out == "a b\n"
    lines = err.splitlines()
    assert lines[1] == "Prompt: 10 tokens (4 cached), 5.000 tokens-per-sec"
    assert lines[2] == "Generation: 2 tokens, 7.000 tokens-per-sec"
    assert lines[3].startswith("Peak memory: ")
    assert lines[4] == "Seed: 9"
    assert run(["generate", "-p", "Hi", "--quiet"]) == 0
    assert capsys.readouterr() == ("a b\n", "")


def test_a_result_ends_with_one_line_break_and_may_begin_with_the_prompt(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for texts, written in ((["a", "b\n"], "ab\n"), (["a\n", ""], "a\n"), (["a\n", "b"], "a\nb\n"), ([""], "\n")):
        monkeypatch.setattr(Fake, "texts", texts)
        for echo in ([], ["--echo"]):
            assert run(["generate", "-p", "Once", "--ignore-chat-template", "--quiet", *echo]) == 0
            assert capsys.readouterr().out == "Once" * len(echo) + written


@pytest.mark.parametrize(("flags", "flag"), [(["--max-tokens", "2"], "--max-tokens"), ([], "--max-context")])
def test_a_reply_that_was_cut_off_is_said_to_be(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], flag: str
) -> None:
    monkeypatch.setattr(Fake, "reason", "length")
    assert run(["generate", "-p", "Hi", *flags]) == 0
    assert f"(cut off after 2 tokens; {flag})" in capsys.readouterr().err
    monkeypatch.setattr(Fake, "reason", "stop")
    assert run(["generate", "-p", "Hi", *flags]) == 0
    assert "cut off" not in capsys.readouterr().err


def test_text_is_written_as_it_comes(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    seen: list[bytes] = []
    chunks = Fake.chunks

    def watched(self: Fake) -> Iterator[lily.StreamChunk]:
        for chunk in chunks(self):
            seen.append(sink.getvalue())
            yield chunk

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Raw(sink)), encoding="utf-8"))
    monkeypatch.setattr(Fake, "chunks", watched)
    assert run(["generate", "-p", "Hi", "--quiet"]) == 0
    assert [*seen, sink.getvalue()] == [b"", b"a ", b"a b\n"]


def test_generate_writes_what_the_engine_replies(capsys: pytest.CaptureFixture[str]) -> None:
    with lily.Engine() as engine:
        expected = engine.chat([{"role": "user", "content": "Once upon a time"}], seed=1, max_tokens=48)
    assert len(expected.text) > 40
    assert run(["generate", "-p", "Once upon a time", "--seed", "1", "--max-tokens", "48", "--quiet"]) == 0
    assert capsys.readouterr() == (expected.text + "\n", "")


def test_what_a_checkpoint_lacks_is_said_before_the_reply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in EMBEDDED.iterdir():
        if file.name not in ("chat_template.jinja", "generation_config.json"):
            (tmp_path / file.name).symlink_to(file)
    args = ["-m", str(tmp_path), "--device", "cpu"]
    assert run(["generate", "-p", "Once", "--max-tokens", "1", *args]) == 0
    notes = capsys.readouterr().err.splitlines()[:2]
    assert notes == [
        "lily: no generation_config.json: replies are greedy (temperature 0) unless options say otherwise",
        "lily: no chat template: the prompt is continued as it is",
    ]
    assert run(["generate", "-p", "Once", "--max-tokens", "1", "--quiet", *args]) == 0
    assert capsys.readouterr().err == ""
    assert run(["info", "--json", *args]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["notes"] == [note.removeprefix("lily: ") for note in notes]
    assert run(["info", *args]) == 0
    assert "\n  no chat template: " in capsys.readouterr().out


def test_an_option_without_effect_is_a_note_and_a_flag_as_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "-p", "Once", "--max-tokens", "1", "--device", "cpu", "--chat-template-config"]
    assert run([*args, '{"enable_thinkng": false}']) == 0
    err = capsys.readouterr().err
    assert err.count("lily: the chat template does not mention 'enable_thinkng', which has no effect") == 1
    assert "Warning" not in err
    message = failure([*args, '{"enable_thinking": "false"}'], capsys)
    assert "enable_thinking is 'false'; the chat template asks it for true or false" in message


def test_json_holds_the_reply_and_a_seed_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "-p", "Tell me a story.", "--max-tokens", "8", "--no-thinking", "--quiet"]
    assert run([*base, "--json", "--logprobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert run([*base, "--seed", str(result["seed"])]) == 0
    assert capsys.readouterr().out == result["text"] + "\n"
    assert len(result["token_ids"]) == result["completion_tokens"] == len(result["logprobs"]) == 8
    assert result["finish_reason"] == "length"
    assert result["model"]["model"] == "lily-tiny"
    assert result["timings"]["generation_tokens_per_second"] > 0
    entry = result["logprobs"][0]
    assert [top["logprob"] for top in entry["top"]] == sorted((top["logprob"] for top in entry["top"]), reverse=True)
    assert len(entry["top"]) == 2
    assert "".join(e["token"] for e in result["logprobs"]) == result["text"]


def test_logprobs_without_json_are_a_line_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "3", "--temp", "0", "--logprobs", "1", "--no-thinking", "--quiet"]
    assert run(["generate", "-p", "Hi", *flags]) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in err.splitlines()]
    assert len(lines) == 3
    assert all(len(line) == 2 and line[0] == line[1] for line in lines)  # greedy: the token is the likeliest
    assert "".join(eval(line[0].rsplit(" ", 1)[0]) for line in lines) == out.removesuffix("\n")


# ---- bad input
@pytest.mark.parametrize(
    ("flags", "words"),
    [
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
        (["-p", "x", "--tmp", "1"], ["--tmp", "Did you mean", "--temp", "see lily generate --help"]),
        (["-p", "x", "--echo"], ["--ignore-chat-template"]),
        (["-p", "x", "--echo", "--ignore-chat-template", "--json"], ["--json"]),
        (["-p", "x", "--stop", "a\udcff"], ["--stop", "UTF-8", "0xff"]),
        (["-p", "x", "--seed", "9" * 30], ["to 18446744073709551615"]),
        (["-p", "x", "--max-tokens", str(1 << 31)], ["to 2147483647"]),
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
    assert "'draw'; there are generate, chat," in usage_error(["draw"], capsys)
    assert "'chta'; did you mean chat? (see lily --help)" in usage_error(["chta"], capsys)


def test_an_end_token_that_is_several_tokens_is_refused(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(["generate", "-p", "x", "--extra-eos-token", "Once upon a time", "--quiet"], capsys)
    assert "Once upon a time" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-m", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
        (["-m", str(DATA)], ["config.json"]),
        (["-m", "some-org/some-model"], ["some-org/some-model", "lily pull some-org/some-model"]),
        (["--device", "metal"], ["metal", "cpu"]),
        (["--max-context", "5"], ["5", "tokens", "with --max-context ("]),
        (["--max-context", "99999"], ["--max-context is 99999", "32768"]),
        (["--chat-template-config", '{"messages": []}'], ["messages"]),
        (["--logit-bias", "4095=1"], ["4095"]),
    ],
)
def test_what_cannot_be_done_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str],
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delitem(kinds.LIBRARIES, "metal", raising=False)
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


@pytest.mark.parametrize("args", [["plan"], ["generate", "--help"], ["--version"]])
def test_an_unwritable_standard_output_is_an_error(args: list[str]) -> None:
    with full_device() as full, lily_process(*args, stdout=full) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.decode().splitlines() == ["lily: error: standard output cannot be written: No space left on device"]


def with_closed(closing: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with the redirections ``closing`` of the shell."""
    command = shlex.join([sys.executable, "-m", "lily", *args])
    return subprocess.run(["sh", "-c", f"{command} {closing}"], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("args", [["plan"], ["--help"], ["--version"], ["chat", "--help"], []])
def test_a_closed_standard_output_is_an_error(args: list[str]) -> None:
    done = with_closed(">&-", *args)
    assert (done.returncode, done.stderr) == (1, "lily: error: standard output cannot be written: it is closed\n")


def test_only_the_result_is_on_standard_output_where_standard_error_is_closed() -> None:
    flags = ["generate", "-p", "Hi", "--max-tokens", "3", "--temp", "0"]
    plain = with_closed("", *flags)
    done = with_closed("2>&-", *flags, "--logprobs", "1", "--verbose")
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
    assert with_closed("2>&-", "paint").stdout == ""
    piped = with_closed("2>&- </dev/null", "chat", "--verbose")
    assert (piped.returncode, piped.stdout) == (0, "")


def test_a_file_that_is_opened_does_not_take_the_place_of_a_closed_stream() -> None:
    """Otherwise what a library writes to its standard error would go into it."""
    code = (
        "import os, tempfile\nfrom lily.cli.console import standard_streams\n"
        "with standard_streams(), tempfile.TemporaryFile() as file:\n"
        "    print(file.fileno() > 2)\n"
    )
    command = shlex.join([sys.executable, "-c", code])
    done = subprocess.run(["sh", "-c", f"{command} <&- 2>&-"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


def test_a_reader_that_goes_away_ends_the_reply_quietly() -> None:
    flags = ["--quiet", "--max-tokens", "20000", "--seed", "1", *NO_END]
    with lily_process("generate", "-p", "Hi", *flags) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr.read() == b""


def test_an_interrupt_ends_generate_with_130() -> None:
    flags = ["--quiet", "--max-tokens", "20000", "--seed", "1", *NO_END]
    with lily_process("generate", "-p", "Hi", *flags) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, b"")
