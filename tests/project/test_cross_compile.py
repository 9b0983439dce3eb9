# SPDX-License-Identifier: Apache-2.0
"""The C and Cython code compiles, without a warning, for machines that the tests do not run on as well.

The compiler is zig's clang from PyPI, which brings the C libraries of Linux and macOS.
Not handled: running the result (NEON kernels run under qemu-user in their own test).
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

TARGETS = {"aarch64-linux-gnu": "Linux", "aarch64-macos": "Darwin"}

# What Python's headers need to know of a 64-bit system; the real pyconfig.h is that of the machine that runs the tests.
PYCONFIG = """
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_LONG 8
#define SIZEOF_INT 4
#define SIZEOF_WCHAR_T 4
#define SIZEOF_PID_T 4
#define ALIGNOF_MAX_ALIGN_T 8
#define HAVE_STDARG_PROTOTYPES 1
#define HAVE_PROTOTYPES 1
#define WITH_THREAD 1
"""


def zig(target: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


@pytest.fixture(scope="module")
def build_rules(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lily_setup", repository / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lily_setup"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_device_libraries_compile_and_link_without_warnings(
    target: str, build_rules: ModuleType, tmp_path: Path
) -> None:
    toolchain = build_rules.Toolchain(zig(target), machine="aarch64", system=TARGETS[target], flags=("-Werror",))
    for library in build_rules.device_libraries("Linux"):  # without Metal, whatever this is (test_metal_api.py)
        built = library.build(toolchain, tmp_path / library.name)
        assert built.stat().st_size > 0
        compiled = {path.stem for path in built.parent.glob("*.o")}
        assert any(name.startswith("isa_neon") for name in compiled)
        assert not any(name.startswith(("isa_avx", "isa_amx")) for name in compiled)


@pytest.mark.parametrize("target", TARGETS)
def test_cython_modules_compile_without_warnings(target: str, repository: Path, tmp_path: Path) -> None:
    headers = tmp_path / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    (headers / "pyconfig.h").write_text(PYCONFIG)
    sources = sorted((repository / "lily").rglob("*.pyx"))
    assert sources
    for source in sources:
        code = tmp_path / f"{source.stem}.c"
        subprocess.run([sys.executable, "-m", "cython", "-3", str(source), "-o", str(code)], check=True)
        macros = ["-DPy_LIMITED_API=0x030b0000", "-DCYTHON_LIMITED_API=1"]
        flags = ["-Werror", "-O1", "-fPIC", "-I", str(headers), "-I", str(repository / "objc_shim"), *macros]
        command = [*zig(target), *flags, "-c", str(code), "-o", str(code.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="reads x86-64 code")
def test_only_code_chosen_at_run_time_depends_on_the_x86_processor(build_rules: ModuleType, tmp_path: Path) -> None:
    """Files other than lily/cpu/paths/isa_avx* and isa_amx* hold no AVX instruction, whatever the width."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump command on this system")
    toolchain = build_rules.Toolchain(build_rules.find_compiler(), flags=("-Werror",))
    avx = re.compile(r"\tv[a-z]\w*\s.*%[xyz]mm\d")
    for library in build_rules.device_libraries():
        built = library.build(toolchain, tmp_path / library.name)
        code = {
            path.stem: subprocess.check_output([objdump, "-d", path], text=True) for path in built.parent.glob("*.o")
        }
        uses = {name for name, text in code.items() if avx.search(text)}
        assert uses, "no vector code found at all: objdump's format has changed"
        assert not [name for name in uses if not name.startswith(("isa_avx", "isa_amx"))]
