# SPDX-License-Identifier: Apache-2.0
"""``make metallib`` and what the Metal device is told of its result, with a stand-in for Xcode's xcrun.

Not handled: whether Apple's compiler takes the flags and the shaders, which needs a Mac with Xcode.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lily.device.shader_library import STAMP, VARIANTS, shader_options, stamp
from lily.msl.flatten import flatten

# Writes its arguments and what it was to compile into the "library", refuses what REFUSE names.
XCRUN = r"""#!/bin/sh
case " $* " in
*" --version "*) test -z "$NO_METAL" || { echo "$NO_METAL" >&2; exit 72; }; exit 0 ;;
*$REFUSE*) test -z "$REFUSE" || { echo "lily.metal:1:1: error: refused" >&2; exit 1; } ;;
esac
flags="$*"
while test $# -gt 2; do source=$1; shift; done
{ echo "$flags"; cat "$source"; } > "$2"
"""


@pytest.fixture
def xcode(tmp_path: Path) -> Path:
    """A folder with xcrun, for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "xcrun").write_text(XCRUN)
    (folder / "xcrun").chmod(0o755)
    return folder


def make(repository: Path, target: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "tools" / "metallib.py"), str(target)]
    env = os.environ | {"PATH": f"{path}:/usr/bin:/bin", "NO_METAL": "", "REFUSE": ""} | environment
    return subprocess.run(command, capture_output=True, text=True, env=env)


def libraries(folder: Path) -> set[str]:
    return {p.stem for p in folder.glob("*.metallib")}


def test_every_library_is_made_of_the_flattened_source_with_the_flags_of_run_time(
    repository: Path, tmp_path: Path, xcode: Path
) -> None:
    out = tmp_path / "metal"
    done = make(repository, out, xcode)
    assert done.returncode == 0, done.stderr
    flags = {}
    for name in ("lily-3.2", "lily-3.2-f32", "lily-4.0"):
        flags[name], source = (out / f"{name}.metallib").read_text().split("\n", 1)
        assert source == flatten()
    math = "-fmetal-math-mode=relaxed -fmetal-math-fp32-functions=precise"
    assert f"-sdk macosx metal -std=metal3.2 -mmacosx-version-min=15.0 {math} /" in flags["lily-3.2"]
    assert f"-std=metal3.2 -mmacosx-version-min=15.0 {math} -DLILY_MATRIX_F32=1 " in flags["lily-3.2-f32"]
    assert f"-std=metal4.0 -mmacosx-version-min=26.0 {math} /" in flags["lily-4.0"]
    assert shader_options(folder=out) == {"metallib": str(out)}


def test_the_flags_are_those_of_the_shim(repository: Path) -> None:
    shim = (repository / "objc_shim" / "metal_library.m").read_text()
    assert "MTLMathModeRelaxed" in shim
    assert "MTLMathFloatingPointFunctionsPrecise" in shim
    assert re.search(r'"#define LILY_MATRIX_F32 1\\n"', shim)
    assert re.search(r'"%s/lily-%s%s\.metallib"', shim)
    assert {v.language for v in VARIANTS} == set(re.findall(r'"(\d\.\d)"', shim))


def test_libraries_of_another_source_are_not_used(repository: Path, tmp_path: Path, xcode: Path) -> None:
    out = tmp_path / "metal"
    make(repository, out, xcode)
    assert shader_options(flatten() + " ", folder=out) == {}
    assert shader_options(folder=tmp_path) == {}
    assert stamp("a") != stamp("b")


def test_a_compiler_without_metal_4_makes_the_others(repository: Path, tmp_path: Path, xcode: Path) -> None:
    out = tmp_path / "metal"
    make(repository, out, xcode)
    done = make(repository, out, xcode, REFUSE="-std=metal4.0")
    assert done.returncode == 0
    assert "no lily-4.0, this compiler refuses MSL 4.0" in done.stdout
    assert libraries(out) == {"lily-3.2", "lily-3.2-f32"}, "the one of the earlier run is gone"
    assert shader_options(folder=out)


def test_shaders_that_do_not_compile_leave_nothing_that_is_used(repository: Path, tmp_path: Path, xcode: Path) -> None:
    out = tmp_path / "metal"
    make(repository, out, xcode)
    done = make(repository, out, xcode, REFUSE="-std=metal3.2")
    assert done.returncode == 1
    assert "lily.metal:1:1: error: refused" in done.stderr
    assert not (out / STAMP).exists()
    assert shader_options(folder=out) == {}


LACKING = {
    "xcrun: error: unable to find utility \"metal\", not a developer tool or in PATH":
        "Xcode's Metal compiler is missing; the command-line tools alone do not have it",
    "cannot execute tool 'metal' due to missing Metal Toolchain; use: xcodebuild -downloadComponent MetalToolchain":
        "Xcode lacks its Metal toolchain (xcodebuild -downloadComponent MetalToolchain)",
}  # fmt: skip


@pytest.mark.parametrize("words", LACKING, ids=["no Xcode", "no toolchain"])
def test_without_the_compiler_one_sentence_says_what_is_missing_and_that_it_is_not_needed(
    words: str, repository: Path, tmp_path: Path, xcode: Path
) -> None:
    done = make(repository, tmp_path / "metal", xcode, NO_METAL=words)
    assert done.returncode == 1
    not_needed = "it is not needed: Lily compiles its shaders when it opens the GPU"
    assert done.stderr == f"make metallib: {LACKING[words]}; {not_needed}.\n"
    assert not (tmp_path / "metal").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has xcrun")
def test_elsewhere_than_on_a_mac_xcrun_is_missing(repository: Path, tmp_path: Path) -> None:
    done = make(repository, tmp_path / "metal", tmp_path)
    assert done.returncode == 1
    assert "xcrun is missing, which comes with Xcode on a Mac" in done.stderr
