# SPDX-License-Identifier: Apache-2.0
"""The CPU device's runtime under load with the compiler's sanitizers: races, memory, undefined behaviour.

``tests/cpu/cpu_stress.c`` checks results too.  Longer runs by hand: ``.../cpu_stress 5000``.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import sanitizer_missing
from waiting import PATIENCE

from lily.kernels import c_header


def compile_stress(repository: Path, folder: Path, sanitizer: str) -> Path:
    """The stress program; skips where the compiler or the system has no such sanitizer."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(sanitizer_missing(compiler[0], sanitizer))
    (folder / "kernel_params.h").write_text(c_header())
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    flags = ["-g", "-O1", "-std=c11", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    tried = subprocess.run([*compiler, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True)
    if tried.returncode or subprocess.run([*prefix(), str(folder / "probe")], capture_output=True).returncode:
        pytest.skip(sanitizer_missing(compiler[0], sanitizer))
    runtime = sorted((repository / "lily" / "cpu" / "runtime").glob("*.c"))
    assert runtime
    own = repository / "tests" / "cpu" / "cpu_stress.c"
    sources = [own, *sorted((repository / "objc_shim").glob("device_*.c")), *runtime]
    target = folder / "cpu_stress"
    command = [*compiler, *flags, "-I", str(repository / "objc_shim"), "-I", str(folder), *map(str, sources)]
    subprocess.run([*command, "-o", str(target), "-lm"], check=True)
    return target


def prefix() -> list[str]:
    """ThreadSanitizer of older compilers fails under some kernels' address randomisation."""
    setarch = shutil.which("setarch")
    return [setarch, platform.machine(), "-R"] if setarch else []


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_runtime_is_clean_under_load(repository: Path, tmp_path: Path, sanitizer: str) -> None:
    stress = compile_stress(repository, tmp_path, sanitizer)
    quiet = {**os.environ, "MallocNanoZone": "0"}  # macOS's allocator has something to say about sanitizers
    done = subprocess.run(
        [*prefix(), str(stress), "60"], env=quiet, capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
