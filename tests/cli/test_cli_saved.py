# SPDX-License-Identifier: Apache-2.0
"""``--prompt-cache-file``, and the flags of ``lily serve`` for conversations that are kept.

Not handled: what is kept (test_engine_saved.py).
"""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from cli_harness import failure, lily_process, usage_error
from waiting import PATIENCE

from lily.cli import run
from lily.units import parse_size

HOW = ["--device", "cpu", "-t", "1", "-c", "1024", "--temp", "0"]
PROMPT = "Once upon a time there was a little girl. " * 8


def generate(file: Path, prompt: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    args = ["generate", *HOW, "--ignore-chat-template", "-n", "8", "--json", "--verbose"]
    assert run([*args, "--prompt-cache-file", str(file), "-p", prompt]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_the_next_command_goes_on_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cache"
    first, err = generate(file, PROMPT, capsys)
    assert first["cached_tokens"] == 0
    assert "Prompt cache: " in err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    longer = PROMPT + first["text"] + " And then"
    second, err = generate(file, longer, capsys)
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert f"tokens from {file}" in err
    cold, _ = generate(tmp_path / "other", longer, capsys)
    assert cold["cached_tokens"] == 0
    assert cold["token_ids"] == second["token_ids"]


def test_a_file_that_is_something_else_is_refused_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "letter"
    file.write_text("Dear Ann")
    message = failure(["generate", *HOW, "--prompt-cache-file", str(file), "-p", "a"], capsys)
    assert "is damaged" in message
    assert file.read_text() == "Dear Ann"


def test_a_folder_that_is_not_there_is_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path, tmp_path / "missing" / "cache"):
        message = usage_error(["generate", "-m", "/nowhere", "--prompt-cache-file", str(file), "-p", "a"], capsys)
        assert "expected a file, which may be missing, in a folder that is there" in message


def test_a_chat_goes_on_the_next_day(tmp_path: Path) -> None:
    """The same messages again, of which all but the last token is there; Ctrl-C keeps what was read, too."""
    file = tmp_path / "cache"
    args = ["chat", *HOW, "-n", "4", "--verbose", "--prompt-cache-file", str(file)]
    with lily_process(*args, stdin=-1) as process:
        _, err = process.communicate(b"Tell me a story about a dog.\n", PATIENCE)
    assert process.returncode == 0
    assert b"Prompt cache: " in err
    with lily_process(*args, stdin=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Tell me a story about a dog.\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert f"tokens from {file}".encode() in err
    assert b" cached)" in err
    assert err.count(b"Prompt cache: ") == 2


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that keeps conversations in ``folder``, in a process of its own, and its address."""
    args = ["serve", *HOW[:-2], "--port", "0", "--quiet", "--cache-dir", str(folder)]
    with lily_process(*args) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()


def cached(url: str, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    request = Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )  # fmt: skip
    with urlopen(request, timeout=PATIENCE) as response:
        usage = json.load(response)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_server_that_is_stopped_keeps_its_conversations_and_one_that_is_killed_those_on_disk(tmp_path: Path) -> None:
    one, two = (f"{number} " + "Once upon a time there was a little girl. " * 60 for number in (1, 2))
    with serving(tmp_path / "kept") as (process, url):
        assert cached(url, one) == 0
        process.terminate()
        assert process.wait(PATIENCE) == 0
    with serving(tmp_path / "kept") as (process, url):
        assert cached(url, one) > 512
        assert cached(url, two) < 512
        process.kill()
        process.wait(PATIENCE)
    with serving(tmp_path / "kept") as (_, url):
        assert cached(url, one) > 512
        assert cached(url, two) < 512


@pytest.mark.parametrize(
    ("text", "size"),
    [("8000000000", 8 * 10**9), ("8GB", 8 * 10**9), ("8 gib", 8 << 30), ("1.5MiB", 3 << 19), ("7k", 7000), ("9B", 9)]
    + [(text, None) for text in ("", "GB", "-1", "8XB", "8GBB", "1e9", "8 G B", "eight")],
)  # fmt: skip
def test_sizes_as_people_write_them(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--cache-bytes", "much"], "'much': expected bytes: 8000000000, 8GB (10^9) or 8GiB (2^30)"),
        (["--cache-disk-bytes", "0"], "'0': expected bytes"),
        (["--cache-disk-bytes", "1GB"], "--cache-disk-bytes is of no use without --cache-dir FOLDER"),
        (["--idle-unload", "0"], "0 is not in the range"),
    ],
)
def test_flags_of_serve_that_make_no_sense(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problem in usage_error(["serve", "-m", "/nowhere", *flags], capsys)


def test_a_limit_that_is_too_small_is_told_in_flags(capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(["serve", *HOW[:-2], "--port", "0", "--cache-bytes", "1k"], capsys)
    assert "--cache-bytes is 1000; allowed are " in message
    assert "or --max-context" in message
