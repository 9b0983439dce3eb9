# SPDX-License-Identifier: Apache-2.0
"""``lily pull``: what it writes, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import failure, usage_error

from lily.cli import run
from lily.errors import LilyError


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


# A download whose thread cannot be interrupted, as those of huggingface_hub.
SLOW_PULL = """
import concurrent.futures, signal, sys, threading
import lily.checkpoint.hub
from lily.cli import run

def pull(spec, progress):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(threading.Event().wait, 300)
        print("downloading", flush=True)
        waiting.result()

lily.checkpoint.hub.pull = pull
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run(["pull", "a/b"]))
"""


def test_an_interrupt_ends_a_download_at_once() -> None:
    command = [sys.executable, "-c", SLOW_PULL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "downloading\n"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)  # the thread alone would take five minutes
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "\nlily: stopped; the same command goes on from here\n")


def test_pull_names_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_disk(*_: object, **__: object) -> None:
        raise LilyError("a/b: 20.4 GB to download, but / has 1.0 GB free")

    monkeypatch.setattr("lily.checkpoint.hub.pull", no_disk)
    assert "20.4 GB" in failure(["pull", "a/b"], capsys)
    assert "ORG/NAME" in usage_error(["pull", "not-a-repository"], capsys)
