# SPDX-License-Identifier: Apache-2.0
"""Runs ``lily`` commands: in a process of their own, or in this one where they are expected to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from lily.cli import run

# The ids that end a reply of lily-tiny.
NO_END = ["--logit-bias", "4066=-100", "--logit-bias", "4064=-100"]


def lily_process(*args: str, environment: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    return python_process("-m", "lily", *args, environment=environment, **options)


def python_process(*args: str, environment: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Ctrl-C reaches it, and its output is buffered as for a user, whatever runs the tests."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here stays ignored there
    try:
        return subprocess.Popen([sys.executable, *args], env={**kept, "TERM": "dumb", **(environment or {})}, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def address_of(server: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a server writes when it listens; in the end it is killed."""
    with server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().decode().strip()
        finally:
            server.kill()


def usage_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lily: error: ")
    assert err.count("\n") == 1
    return err


def failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run([*args, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lily: error: ")
    assert "Traceback" not in err
    return err
