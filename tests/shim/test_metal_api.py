# SPDX-License-Identifier: Apache-2.0
"""The Metal shim sends only what Apple's headers know, with their types and values, nothing newer than macOS 15.

It is compiled for macOS with zig against a Metal.h generated from metal-cpp.  Not handled: whether Metal does what its
documentation says; that needs a Mac.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest
from metal import macho, toolchain
from metal.toolchain import Missing

SHIM = toolchain.SHIM
FLOOR = (15, 0)


@pytest.fixture(scope="module")
def library() -> macho.MachO:
    """The shim for macOS."""
    try:
        return macho.read(toolchain.macos_library())
    except Missing as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def metal_h(library: macho.MachO) -> str:
    return (toolchain.headers() / "Metal" / "Metal.h").read_text()


# ---- types and names ----
# What is wrong: (file, text in it, wrong text, what the compiler says).
MISTAKES = {
    "a misspelt message": ("metal_encode.m", "[e->encoder endEncoding]", "[e->encoder endEncodings]", "not found"),
    "a message of another class": (
        "metal_residency.m", "[d->queue addResidencySet:d->residency]", "[d->gpu addResidencySet:d->residency]",
        "not found"),
    "arguments in the wrong order": (
        "metal_encode.m", "setBuffers:list->buffers + r->first", "setBuffers:list->offsets + r->first", "incompatible"),
    "a missing argument": (
        "metal_pipelines.m", "type:MTLDataTypeInt atIndex:", "atIndex:", "'-setConstantValue:atIndex:' not found"),
    "a number for an object": ("metal_library.m", "newLibraryWithURL:url", "newLibraryWithURL:path", "incompatible"),
    "an enum of another kind": (
        "metal_library.m", "setMathMode:MTLMathModeRelaxed", "setMathMode:MTLMathFloatingPointFunctionsPrecise",
        "different enumeration type"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_compiler_finds(mistake: str, library: macho.MachO, tmp_path: Path) -> None:
    file, right, wrong, message = MISTAKES[mistake]
    shutil.copytree(SHIM, tmp_path / "shim", dirs_exist_ok=True)
    text = (tmp_path / "shim" / file).read_text()
    assert text.count(right) == 1, f"{file} no longer holds {right!r} once: choose another place for the mistake"
    (tmp_path / "shim" / file).write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError, match=re.escape(message)):
        toolchain.compile_for_macos(tmp_path / "shim" / file, tmp_path / "out.o")


@pytest.mark.parametrize("header", sorted(path.name for path in SHIM.glob("*.h")))
def test_a_header_includes_what_it_needs(header: str, library: macho.MachO, tmp_path: Path) -> None:
    objective = header == "metal_runtime.h"
    source = tmp_path / ("alone.m" if objective else "alone.c")
    source.write_text(f'#include "{header}"\n')
    toolchain.compile_for_macos(source, tmp_path / "alone.o")


# ---- values ----
# metal-cpp gives it 32; Apple's headers, and pyobjc from them, 48.  Nothing in Lily uses it.
KNOWN_DIFFERENCES = {"MTLResourceStorageModeMemoryless"}


@pytest.fixture(scope="module")
def apple_values(library: macho.MachO) -> dict[str, int]:
    """Enum values that pyobjc read from Apple's headers."""
    try:
        wheel = toolchain.pip_download(
            "pyobjc-framework-Metal", "--platform", "macosx_10_13_universal2", "--python-version", "3.12"
        )
    except Missing as problem:
        pytest.skip(str(problem))
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("Metal/_metadata.py").decode()
    values = re.search(r'^enums = """(.*?)"""', text, re.M)
    assert values is not None
    return {m[1]: int(m[2]) for m in re.finditer(r"\$(MTL\w+)@(-?\d+)(?=\$)", values[1])}


def test_enum_values_are_those_of_apples_headers(apple_values: dict[str, int], metal_h: str, tmp_path: Path) -> None:
    ours = set(re.findall(r"^    (MTL\w+)(?: =|,)", metal_h, re.M))
    both = sorted(ours & apple_values.keys() - KNOWN_DIFFERENCES)
    assert len(both) > 800
    lines = [f'_Static_assert({n} == {apple_values[n]}ull, "{n}");' for n in both]
    source = tmp_path / "values.m"
    source.write_text("#import <Metal/Metal.h>\n" + "\n".join(lines) + "\n")
    toolchain.compile_for_macos(source, tmp_path / "values.o")
    used = {n for p in SHIM.glob("*.[mh]") for n in re.findall(r"\bMTL\w+", p.read_text())} & ours
    assert used, "the shim uses no value at all?"
    assert used <= apple_values.keys()
    assert not used & KNOWN_DIFFERENCES


def test_a_wrong_enum_value_is_noticed(library: macho.MachO, tmp_path: Path) -> None:
    source = tmp_path / "values.m"
    source.write_text('#import <Metal/Metal.h>\n_Static_assert(MTLGPUFamilyApple7 == 1006ull, "family");\n')
    with pytest.raises(AssertionError, match="family"):
        toolchain.compile_for_macos(source, tmp_path / "values.o")


# ---- availability ----
def availability() -> dict[str, tuple[int, ...]]:
    lines = (toolchain.HERE / "availability.tsv").read_text().splitlines()
    rows = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return {message: tuple(map(int, version.split("."))) for message, version in rows}


def test_every_message_to_metal_was_introduced_by_macos_15(library: macho.MachO) -> None:
    foundation = (toolchain.HERE / "sdk" / "Foundation" / "Foundation.h").read_text()
    declared = re.findall(r"^[-+] \([^)]*\)(\w+:?)", foundation, re.M)
    plain = {*declared, "respondsToSelector:", "alloc", "init", "retain", "release", "autorelease"}
    known = availability()
    assert library.messages - plain == known.keys()
    assert {m: v for m, v in known.items() if v > FLOOR} == {}


# ---- the library ----
def test_the_library_is_for_macos_15_on_arm64(library: macho.MachO) -> None:
    assert (library.architecture, library.kind) == (macho.ARM64, macho.DYNAMIC_LIBRARY)
    assert (library.platform, library.minimum_os) == (macho.MACOS, "15.0")
    assert library.install_name == "@rpath/liblily_metal.dylib"
    assert library.signed, "arm64 Macs refuse unsigned code"


def test_the_library_links_apples_frameworks_only(library: macho.MachO) -> None:
    system = "/System/Library/Frameworks/"
    assert set(library.libraries) == {
        f"{system}Metal.framework/Versions/A/Metal",
        f"{system}Foundation.framework/Versions/C/Foundation",
        f"{system}CoreFoundation.framework/Versions/A/CoreFoundation",
        f"{system}CoreGraphics.framework/Versions/A/CoreGraphics",
        "/usr/lib/libobjc.A.dylib",
        "/usr/lib/libSystem.B.dylib",
    }
    assert "dynamic lookup" not in library.imports.values()


def test_the_library_exports_the_device_interface_and_nothing_else(library: macho.MachO) -> None:
    header = (SHIM / "lily_device.h").read_text()
    functions = set(re.findall(r"^LILY_API [^;(]*?(\w+)\(", header, re.M))
    assert "lily_submit" in functions
    linker = {"___dso_handle", "__mh_dylib_header"}
    assert {f"_{name}" for name in functions} == library.exports - linker
