# SPDX-License-Identifier: Apache-2.0
"""On a Mac every test module is collected, and what needs Linux skips with a reason, without clang-19 and GNUstep.

A Python that takes itself for a Mac's, with an empty path, collects them here.  Not handled: running them there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Loaded before conftest.py; what looks at the system when it is imported must be imported first.
PLUGIN = """
import asyncio, ctypes, multiprocessing, os, platform, shutil, socket, subprocess, sys, tempfile
import click, huggingface_hub, hypothesis, jinja2, ml_dtypes, numpy, safetensors.numpy, scipy.stats, setuptools
import tokenizers
from pathlib import Path
from lily.device import kinds

kinds.LIBRARIES["metal"] = Path("/liblily_metal.dylib")
sys.platform, platform.system, platform.machine = "darwin", lambda: "Darwin", lambda: "arm64"
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
"""
REASONS = {
    "the emulator of the shaders runs on Linux only",
    "the stand-in for Metal runs where there is no Metal",
    "a Mac builds its wheel with `make wheel`",
}


@pytest.fixture
def pretend(tmp_path: Path, repository: Path) -> list[str]:
    """pytest on the pretended Mac, and the environment in which it finds no tool."""
    (tmp_path / "pretend_mac.py").write_text(PLUGIN)
    (tmp_path / "bin").mkdir()
    return [sys.executable, "-m", "pytest", "-q", "-p", "pretend_mac", "-p", "no:cacheprovider"]


def run(pretend: list[str], tmp_path: Path, repository: Path, *arguments: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LILY_", "PYTEST_"))}
    environment = {**kept, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "default"}
    done = subprocess.run([*pretend, *arguments], cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_every_module_is_collected(pretend: list[str], tmp_path: Path, repository: Path) -> None:
    out = run(pretend, tmp_path, repository, "--collect-only")
    modules = {path.name for path in (repository / "tests").rglob("test_*.py")}
    assert modules - set(re.findall(r"^tests/\w+/(test_\w+\.py)::", out, re.MULTILINE)) <= {
        "test_editable.py",
        "test_server_router.py",
        "test_shaders_mlx.py",
    }  # all full


def test_what_needs_linux_skips_with_one_reason(pretend: list[str], tmp_path: Path, repository: Path) -> None:
    tests = repository / "tests"
    own = ["msl/test_msl_emulator.py", "shim/test_metal_engine.py", "project/test_wheel_macos.py"]
    files = [*(tests / name for name in own), *sorted(tests.glob("shim/test_metal_shim*.py"))]
    out = run(pretend, tmp_path, repository, *map(str, files))
    found = {m[1] for m in re.finditer(r"^\d+ × (.*)$", out, re.MULTILINE)}
    assert found == REASONS


def test_shaders_run_on_the_device_there(pretend: list[str], tmp_path: Path, repository: Path) -> None:
    """Their tests are not skipped: without the library they fail, and say how to build it."""
    command = [*pretend, "tests/shaders/test_shaders_route.py", "-x"]
    with pytest.raises(AssertionError, match=r"'metal' device is missing.*make build"):
        run(command, tmp_path, repository)
