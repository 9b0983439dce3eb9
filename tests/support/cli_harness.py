# SPDX-License-Identifier: Apache-2.0
"""Runs `lily` commands: in a process of their own, or in this one where they are expected to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from lily.cli import run

# The ids that end a reply of lily-tiny.
NO_END = ["--logit-bias", "4066=-100", "--logit-bias", "4064=-100"]


def lily_process(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    # Buffered as for a user, whatever the environment of the tests says.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"TERM": "dumb"}
    return subprocess.Popen([sys.executable, "-m", "lily", *args], env=environment, **pipes)


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
