# SPDX-License-Identifier: Apache-2.0
"""How much of the Metal shim its tests run: the share of its lines, printed and held to a minimum.

Not handled: branches; code that only exists on macOS (two `#if defined(__APPLE__)`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from metal import toolchain
from metal.toolchain import Missing

MINIMUM = 90.0


def llvm_tool(name: str) -> str:
    """A tool of the same LLVM as the compiler."""
    suffix = Path(toolchain.clang()).name.removeprefix("clang")
    found = shutil.which(f"llvm-{name}{suffix}")
    if not found:
        pytest.skip(f"no llvm-{name}{suffix}; install llvm{suffix}")
    return found


def test_the_tests_run_nearly_every_line_of_the_shim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        toolchain.objc_headers()
        merge, report = llvm_tool("profdata"), llvm_tool("cov")
        library = toolchain.gnustep_library(coverage=True)
    except Missing as problem:
        pytest.skip(str(problem))
    except AssertionError as problem:
        if "clang_rt" in str(problem) or "profile" in str(problem):
            pytest.skip("no profile runtime of clang; install libclang-rt-19-dev")
        raise
    environment = os.environ | {"LILY_SHIM_COVERAGE": "1", "LLVM_PROFILE_FILE": str(tmp_path / "%p.profraw")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_metal_shim.py"]
    done = subprocess.run(command, cwd=toolchain.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    merged = tmp_path / "merged.profdata"
    subprocess.run([merge, "merge", "-sparse", *map(str, tmp_path.glob("*.profraw")), "-o", str(merged)], check=True)
    said = subprocess.check_output(
        [report, "export", "-summary-only", str(library), f"-instr-profile={merged}"], text=True
    )
    files = {Path(f["filename"]).name: f["summary"]["lines"] for f in json.loads(said)["data"][0]["files"]}
    covered, lines = (sum(f[key] for f in files.values()) for key in ("covered", "count"))
    share = 100 * covered / lines
    with capsys.disabled():
        print(f"\nlines of objc_shim run by its tests: {covered} of {lines} ({share:.1f} %)")
        for name, f in sorted(files.items()):
            print(f"  {name}: {f['percent']:.1f} %")
    assert "lily_metal.m" in files
    assert share >= MINIMUM
