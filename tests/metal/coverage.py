# SPDX-License-Identifier: Apache-2.0
"""How many lines of the Metal shim its tests run, by file: they run once more, in a process that counts.

Not handled: branches; code that exists on macOS only (``#if defined(__APPLE__)``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from metal import toolchain
from metal.toolchain import NO_PROFILE, Missing

TESTS = "shim/test_metal_shim_*.py", "shim/test_metal_replay.py"


@dataclass(frozen=True)
class Coverage:
    """Lines that were run and lines in all, by file of objc_shim."""

    files: dict[str, tuple[int, int]]

    @property
    def covered(self) -> int:
        return sum(run for run, _ in self.files.values())

    @property
    def lines(self) -> int:
        return sum(count for _, count in self.files.values())

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.lines

    def summary(self) -> list[str]:
        """Lines to print."""
        table = [f"  {name}: {100 * run / count:.1f} %" for name, (run, count) in sorted(self.files.items())]
        return [f"line coverage of objc_shim/: {self.percent:.1f} % ({self.covered} of {self.lines})", *table]


_measured: Coverage | None = None


def summary() -> list[str]:
    """What was measured in this process, to print at its end; nothing if it was not."""
    return _measured.summary() if _measured else []


def _llvm_tool(name: str) -> str:
    """A tool of the same LLVM as the compiler."""
    suffix = Path(toolchain.clang()).name.removeprefix("clang")
    found = shutil.which(f"llvm-{name}{suffix}")
    if not found:
        raise Missing(NO_PROFILE)
    return found


def _counting_library() -> Path:
    toolchain.objc_headers()
    try:
        return toolchain.gnustep_library(coverage=True)
    except AssertionError as problem:
        if "clang_rt" in str(problem) or "profile" in str(problem):
            raise Missing(NO_PROFILE) from None
        raise


def measure(work: Path) -> Coverage:
    """Runs the shim's tests; Missing without the tools, AssertionError if a test fails. ``work`` is an empty folder."""
    global _measured
    merge, report, library = _llvm_tool("profdata"), _llvm_tool("cov"), _counting_library()
    environment = os.environ | {"LILY_SHIM_COVERAGE": "1", "LLVM_PROFILE_FILE": str(work / "%p.profraw")}
    tests = [str(path) for pattern in TESTS for path in sorted((toolchain.ROOT / "tests").glob(pattern))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=toolchain.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    merged = work / "merged.profdata"
    subprocess.run([merge, "merge", "-sparse", *map(str, work.glob("*.profraw")), "-o", str(merged)], check=True)
    said = subprocess.check_output(
        [report, "export", "-summary-only", str(library), f"-instr-profile={merged}"], text=True
    )
    lines = {Path(f["filename"]).name: f["summary"]["lines"] for f in json.loads(said)["data"][0]["files"]}
    _measured = Coverage({name: (f["covered"], f["count"]) for name, f in lines.items() if f["count"]})
    return _measured
