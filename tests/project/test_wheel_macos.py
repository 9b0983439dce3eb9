# SPDX-License-Identifier: Apache-2.0
"""``make wheel-macos``: what the wheel for Apple silicon holds, read from the wheel itself.

Not handled: installing or running it, which needs a Mac; the Metal shim's messages (test_metal_api.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from metal import macho, toolchain
from metal.toolchain import Missing
from package_contents import cython_modules, shaders, wheel_files

SYSTEM = "/usr/lib/libSystem.B.dylib"
FRAMEWORKS = {
    "/usr/lib/libobjc.A.dylib",
    *(f"/System/Library/Frameworks/{name}.framework/Versions/{version}/{name}"
      for name, version in (("Metal", "A"), ("Foundation", "C"), ("CoreFoundation", "A"), ("CoreGraphics", "A"))),
}  # fmt: skip
CPU, METAL = "lily/cpu/liblily_cpu.dylib", "lily/metal/liblily_metal.dylib"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The wheel, unpacked."""
    if sys.platform == "darwin":
        pytest.skip("a Mac builds its wheel with `make wheel`")
    try:
        toolchain.zig()
        toolchain.metal_cpp()
    except Missing as problem:
        pytest.skip(str(problem))
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, str(repository / "tools" / "wheel_macos.py"), str(folder / "dist")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = (folder / "dist").iterdir()
    assert re.fullmatch(r"lily_engine-[\d.]+-cp311-abi3-macosx_15_0_arm64\.whl", file.name)
    zipfile.ZipFile(file).extractall(folder / "files")
    return folder / "files"


@pytest.fixture(scope="module")
def binaries(wheel: Path) -> dict[str, macho.MachO]:
    """Every compiled file by its name in the wheel."""
    files = [p for p in wheel.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"]
    assert not [p for p in wheel.rglob("*") if p.suffix in (".so", ".dylib") and p not in files]
    return {p.relative_to(wheel).as_posix(): macho.read(p) for p in files}


def test_the_wheel_has_both_devices_and_the_cython_modules(binaries: dict[str, macho.MachO], repository: Path) -> None:
    modules = {f"{module}.abi3.so" for module in cython_modules(repository)}
    assert binaries.keys() == {CPU, METAL} | modules


def test_every_binary_is_signed_arm64_code_for_macos_15(binaries: dict[str, macho.MachO]) -> None:
    for name, binary in binaries.items():
        found = (binary.architecture, binary.platform, binary.minimum_os, binary.signed)
        assert found == (macho.ARM64, macho.MACOS, "15.0", True), name


def test_nothing_is_linked_that_macos_does_not_have(binaries: dict[str, macho.MachO]) -> None:
    for name, binary in binaries.items():
        assert set(binary.libraries) == ({SYSTEM} | (FRAMEWORKS if name == METAL else set())), name
        assert binary.rpaths == [], name
        assert binary.install_name == f"@rpath/{name.rpartition('/')[2]}", name


def test_no_path_of_the_machine_that_built_it_is_inside(
    wheel: Path, binaries: dict[str, macho.MachO], repository: Path
) -> None:
    for name in binaries:
        assert str(repository).encode() not in (wheel / name).read_bytes(), name


def test_only_python_itself_is_left_to_be_found_at_run_time(binaries: dict[str, macho.MachO]) -> None:
    for name, binary in binaries.items():
        open_symbols = {s for s, where in binary.imports.items() if where == "dynamic lookup"}
        if name.endswith(".abi3.so"):
            assert open_symbols, name
            assert not [s for s in open_symbols if not s.startswith(("_Py", "__Py"))], name
        else:
            assert open_symbols == set(), name


def test_libraries_export_the_device_interface_and_modules_their_start(
    binaries: dict[str, macho.MachO], repository: Path
) -> None:
    header = (repository / "objc_shim" / "lily_device.h").read_text()
    functions = {f"_{name}" for name in re.findall(r"^LILY_API [^;(]*?(\w+)\(", header, re.M)}
    linker = {"___dso_handle", "__mh_dylib_header"}
    for name, binary in binaries.items():
        if name.endswith(".abi3.so"):
            module = name.rpartition("/")[2].removesuffix(".abi3.so")
            assert f"_PyInit_{module}" in binary.exports
        else:
            assert functions <= binary.exports, name
            assert not [s for s in binary.exports - functions - linker if not s.startswith("_lily_")], name


def test_the_cpu_library_has_its_neon_kernels(wheel: Path) -> None:
    text = (wheel / CPU).read_bytes()
    assert b"neon\0" in text
    assert b"avx512" not in text.replace(b"auto, portable, avx2, avx512", b"")


def test_the_wheel_holds_what_the_tree_says_and_nothing_else(wheel: Path, repository: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    names = {p.relative_to(wheel).as_posix() for p in wheel.rglob("*") if p.is_file()}
    assert names == wheel_files(repository, ".abi3.so", {CPU, METAL}, info.name)


def test_shader_sources_are_inside_as_they_are(wheel: Path, repository: Path) -> None:
    for name in shaders(repository):
        assert (wheel / "lily" / "data" / name).read_text() == (repository / name).read_text()


def test_the_wheel_is_tagged_for_the_machines_it_runs_on(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info/WHEEL")
    assert "Tag: cp311-abi3-macosx_15_0_arm64" in metadata.read_text().splitlines()
    assert "Root-Is-Purelib: false" in metadata.read_text()
