# SPDX-License-Identifier: Apache-2.0
"""``lily serve``: what its flags come to, what it refuses before a model is loaded, and how it ends.

Not handled: what the server answers (tests/server).
"""

from __future__ import annotations

import json
import logging
import plistlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import pytest
from cli_harness import address_of, failure, lily_process, usage_error
from waiting import PATIENCE

from lily.cli import run
from lily.cli.serve import serve
from lily.server import serving
from lily.server.app import App
from lily.server.settings import Settings

TINY = ["serve", "--device", "cpu", "-t", "1", "-c", "256", "--port", "0"]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LILY_API_KEY", raising=False)


def served(args: list[str], monkeypatch: pytest.MonkeyPatch) -> App:
    """The application that a command would serve."""
    apps: list[App] = []

    def serve(app: App, bound: socket.socket, ready: Any) -> None:
        apps.append(app)
        ready()

    monkeypatch.setattr(serving, "serve", serve)
    assert run([*TINY, *args]) == 0
    return apps[0]


@contextmanager
def running(*args: str, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command in a process of its own, and the address that it writes."""
    process = lily_process(*TINY, *args, **options)
    with address_of(process) as address:
        yield process, address


# ---- flags
def test_without_flags_a_server_is_private_and_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    app = served([], monkeypatch)
    assert app.settings == Settings("lily-tiny", hosts=frozenset({"127.0.0.1"}))
    assert (app.settings.key, app.settings.origins) == (None, frozenset())
    assert app.settings.queue >= 32
    assert app.engine.max_context == 256


def test_every_flag_reaches_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    flags = {
        "--api-key-file": str(tmp_path / "key"), "--allowed-hosts": "lily.lan, [::9],A.lan", "--served-model-name": "q",
        "--allowed-origins": "https://a.example", "--max-tokens": "77", "--queue": "17", "--request-timeout": "9.5",
        "--chat-template-args": '{"enable_thinking": false}', "--host": "localhost", "--sequences": "2",
        "--cache-bytes": "50MB", "--cache-dir": str(tmp_path / "kept"), "--cache-disk-bytes": "1GiB",
        "--idle-unload": "60",
    }  # fmt: skip
    app = served([word for pair in flags.items() for word in pair], monkeypatch)
    assert app.engine.sequences == 2
    assert (app.engine._residents._budget, app.engine._residents._shelf._limit) == (50_000_000, 1 << 30)
    assert (tmp_path / "kept").is_dir()
    assert app.settings == Settings(
        "q", hosts=frozenset({"localhost", "lily.lan", "::9", "a.lan"}), origins=frozenset({"https://a.example"}),
        key="s3cret", max_tokens=77, queue=17, request_timeout=9.5, template_args={"enable_thinking": False},
        idle_unload=60,
    )  # fmt: skip


def test_a_key_comes_from_file_flag_or_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("of-file")
    monkeypatch.setenv("LILY_API_KEY", "of-environment")
    assert served([], monkeypatch).settings.key == "of-environment"
    assert "other users" not in capsys.readouterr().err
    assert served(["--api-key-file", str(tmp_path / "key")], monkeypatch).settings.key == "of-file"
    assert served(["--api-key", "of-flag"], monkeypatch).settings.key == "of-flag"
    out, err = capsys.readouterr()
    assert "other users of this machine see --api-key" in err
    assert "of-flag" not in out + err


def test_the_address_is_all_that_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served([], monkeypatch)
    out, err = capsys.readouterr()
    assert out.startswith("http://127.0.0.1:")
    assert out.count("\n") == 1
    assert "lily: serving lily-tiny" in err


def test_of_all_addresses_one_is_written_at_which_it_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served(["--host", "0.0.0.0", "--no-api-key"], monkeypatch)
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


def test_logging_is_as_before_when_the_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("lily")
    before = logger.level, logger.propagate, list(logger.handlers)
    served(["--log-level", "debug"], monkeypatch)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


# ---- what is refused
def test_an_exposed_server_needs_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = usage_error([*TINY, "--host", "0.0.0.0"], capsys)
    assert all(remedy in error for remedy in ("--api-key-file", "LILY_API_KEY", "--host 127.0.0.1", "--no-api-key"))
    assert served(["--host", "0.0.0.0", "--api-key", "k"], monkeypatch).settings.key == "k"
    everybody = served(["--host", "0.0.0.0", "--no-api-key"], monkeypatch).settings
    assert (everybody.key, everybody.hosts) == (None, frozenset())


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--api-key", "a", "--api-key-file", "b"], "--api-key and --api-key-file"),
     (["--api-key", "a", "--no-api-key"], "--no-api-key"),
     (["--api-key", ""], "--api-key holds no key"),
     (["--api-key", "a b"], "--api-key holds no key"),
     (["--api-key", "schlüssel"], "--api-key holds no key"),
     (["--api-key-file", "/nowhere/key"], "/nowhere/key"),
     (["--queue", "15"], "--queue"),
     (["--port", "65536"], "--port"),
     (["--max-tokens", "0"], "--max-tokens"),
     (["--request-timeout", "0"], "--request-timeout"),
     (["--chat-template-args", "[]"], "JSON object"),
     (["--log-level", "loud"], "--log-level"),
     (["--device", "tpu"], "--device")],
    ids=str,
)  # fmt: skip
def test_a_wrong_flag_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in usage_error([*TINY, *flags], capsys)


def test_an_address_that_cannot_be_had_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = failure(["serve", "-m", "/no/such/model", "--port", port], capsys)
    assert f"port {port} cannot be bound" in error
    assert "--port" in error
    assert "no address of this machine" in failure(["serve", "--host", "no.such.host.invalid"], capsys)


def test_without_its_packages_it_says_how_to_install_them(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {name for name in sys.modules if name.startswith("lily.server")}
    with mock.patch.dict(sys.modules):
        for name in ours:
            del sys.modules[name]
        sys.modules["uvicorn"] = None  # type: ignore[assignment]
        error = failure(TINY, capsys)
    assert "pip install '.[serve]'" in error
    assert error.count("\n") == 1


def test_the_command_of_the_plist_in_the_documentation_is_one(repository: Path) -> None:
    text = (repository / "docs/serving.md").read_text().partition("```xml\n")[2].partition("```")[0]
    name, command, *arguments = plistlib.loads(text.encode())["ProgramArguments"]
    assert (Path(name).name, command) == ("lily", "serve")
    with serve.make_context("serve", arguments) as context:
        assert context.params["idle_unload"] == 3600


# ---- its life
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_streams_and_server(number: signal.Signals, status: int) -> None:
    with running() as (process, address):
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True}
        asked = Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(asked, timeout=PATIENCE) as reply:
            assert reply.readline().startswith(b"data: ")
            process.send_signal(number)
            rest = reply.read()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert b'"code":"stopping"' in rest or b"[DONE]" in rest
    assert out == b""
    assert b"Traceback" not in err


def test_quiet_leaves_the_address_and_no_log(tmp_path: Path) -> None:
    with running("--quiet") as (process, address):
        with urlopen(f"{address}/health", timeout=PATIENCE) as reply:
            assert json.load(reply)["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE) == (b"", b"")
    assert process.returncode == 0
