# SPDX-License-Identifier: Apache-2.0
"""Compiles shaders and the emulator, and keeps the results in build/msl by the hash of everything that went in.

Not handled: cleaning the cache (``make clean`` removes it); which compiler (msl_compiler.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msl_compiler import the_compiler
from paths import TESTS
from published import publish

from lily.kernels import c_header
from lily.msl import flatten as flatten_module
from lily.msl.flatten import flatten
from lily.msl.host import host_source
from lily.msl.preprocess import Resolver, metal_defines, preprocess
from lily.msl.translate import Options, translate
from lily.msl.translation import Translation

HERE = TESTS
CACHE = HERE.parent / "build" / "msl"
EMULATOR = HERE / "emulator"
INCLUDE = Path(flatten_module.__file__).parent / "include"
DEVICE = TESTS.parent / "objc_shim"

_COMMON = ["-std=c++20", "-fPIC", "-pthread", "-fno-omit-frame-pointer"]
_KERNEL = [
    "-O1", "-Wno-everything", "-Werror=vla", "-Werror=return-type", "-Werror=sometimes-uninitialized",
    "-ffp-contract=on", "-fno-math-errno", "-fno-strict-aliasing",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden",
]  # fmt: skip
# Every access calls the emulator (tests/emulator/sanitizer.cpp); no sanitizer's own runtime is linked.
_CHECKED = [
    "-DMSL_CHECKED", "-DMSL_COVERAGE", "-gline-tables-only", "-gdwarf-4", "-fno-sanitize-link-runtime",
    "-fsanitize=thread,bounds,shift,integer-divide-by-zero,float-cast-overflow", "-fno-sanitize=local-bounds",
    *(f"-mllvm=-tsan-{option}" for option in (
        "instrument-func-entry-exit=0", "instrument-atomics=0", "instrument-read-before-write=1",
        "distinguish-volatile=1",
    )),
]  # fmt: skip


@cache
def _machine_flags() -> list[str]:
    """Half precision and fused multiply-add in hardware where the machine has them; results do not depend on it."""
    if platform.machine() != "x86_64":
        return []
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    wide = all(re.search(rf"\b{f}\b", flags) for f in ("avx2", "fma", "f16c"))
    half = ["-Xclang", "-ffloat16-excess-precision=none"]
    return [*(["-mavx2", "-mfma", "-mf16c"] if wide else []), *half]


def _compile(what: str | Path, suffix: str, command: Sequence[str], name: str) -> Path:
    """The file that ``command`` makes of a text or a file, from the cache if it is there."""
    key = hashlib.sha256("\0".join([str(what), *command, _headers_hash()]).encode()).hexdigest()[:24]
    target = CACHE / f"{name}-{key}{suffix}"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    own = f"{name}-{key}.{os.getpid()}.{threading.get_ident()}"  # several threads and processes may want the same
    text, part = CACHE / f"{own}.cpp", CACHE / f"{own}.part"
    source = what if isinstance(what, Path) else text
    if isinstance(what, str):
        source.write_text(what)
    try:
        done = subprocess.run([*command, str(source), "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{name} does not compile:\n{done.stderr[:8000]}")
        part.replace(target)
    finally:
        text.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    return target


@cache
def _headers_hash() -> str:
    digest = hashlib.sha256(the_compiler().version.encode())
    for path in sorted([*INCLUDE.glob("*.h"), *EMULATOR.glob("*.h"), *EMULATOR.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _kernel_table() -> Path:
    """A folder with kernel_params.h."""
    return publish(CACHE / "table" / "kernel_params.h", c_header()).parent


@cache
def runtime_path() -> Path:
    """The emulator's shared library, compiled if need be."""
    sources = [*sorted(DEVICE.glob("device_*.c")), *sorted(EMULATOR.glob("*.cpp"))]
    inputs = [*sorted(DEVICE.glob("*device*.[ch]")), _kernel_table() / "kernel_params.h"]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in inputs)).hexdigest()
    text = "".join([f"// {digest}\n", *(f'#include "{p}"\n' for p in sources)])
    clang = the_compiler()
    warnings = ["-Wall", "-Wextra", "-Werror"]
    include = [f"-I{folder}" for folder in (EMULATOR, DEVICE, _kernel_table())]
    compiled = _compile(text, ".o", [*clang.command, *_COMMON, "-O2", *warnings, *include, "-c"], "runtime")
    # Kernels find it by this name, whatever the linker makes of a path.
    link = [*clang.linker, "-shared", "-pthread", "-Wl,-Bsymbolic", f"-Wl,-soname,{compiled.stem}.so"]
    return _link(compiled, link)


def _link(compiled: Path, command: Sequence[str]) -> Path:
    """The shared library beside an object file and of its name, from the cache if it is there."""
    target = compiled.with_suffix(".so")
    if not target.exists():
        part = target.with_name(f"{target.stem}.{os.getpid()}.part")
        done = subprocess.run([*command, str(compiled), "-o", str(part)], capture_output=True, text=True)
        assert done.returncode == 0, f"{target.name} does not link:\n{done.stderr[:8000]}"
        part.replace(target)
    return target


@cache
def runtime() -> Any:
    """The loaded emulator."""
    lib = ctypes.CDLL(str(runtime_path()))
    lib.msl_reports.restype = ctypes.c_char_p
    lib.msl_dispatch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.msl_region_new.restype = ctypes.c_void_p
    lib.msl_region_new.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    lib.msl_region_free.argtypes = [ctypes.c_void_p]
    lib.msl_view.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
    lib.msl_counts.argtypes = [ctypes.c_void_p]
    return lib


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint8),
        ("index", ctypes.c_uint8),
        ("readonly", ctypes.c_uint8),
        ("name", ctypes.c_char_p),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(_Argument)),
        ("argument_count", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Library:
    """One compiled kernel."""

    path: Path
    entry: int
    max_threads: int
    arguments: tuple[tuple[int, int, bool, str], ...]  # kind, index, read-only, name
    statements: tuple[tuple[str, int], ...]  # of a checked build: file and line of each byte of msl_covered
    handle: Any


def _flags(checked: bool) -> list[str]:
    return [
        *_COMMON, *_KERNEL, *_machine_flags(), *(_CHECKED if checked else []), "-I", str(INCLUDE), "-I", str(EMULATOR),
    ]  # fmt: skip


@cache
def _precompiled(checked: bool, flags: tuple[str, ...] = ()) -> Path:
    """The emulator's header, parsed once for all kernels."""
    # Without time stamps: a checkout may touch files that did not change.
    options = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header"]
    command = [*the_compiler().command, *_flags(checked), *flags, *options]
    return _compile(EMULATOR / "msl_host.h", ".pch", command, "header")


@cache
def shader_source(act: str = "bf16") -> str:
    """What a Metal compiler would get."""
    return flatten(act_f32=act == "f32")


@cache
def translation(source: str, metal: int, checked: bool, resolve: Resolver | None = None) -> Translation:
    """The translated source; one serves all kernels and constants."""
    tokens = preprocess(source, "source.metal", metal_defines(metal), resolve)
    return translate(tokens, Options(coverage=checked))


def kernel_library(
    kernel: str, constants: Mapping[str, Any], *, act: str = "bf16", metal: int = 320, checked: bool = False,
    source: str | None = None, resolve: Resolver | None = None, flags: Sequence[str] = (), alone: bool | None = None,
) -> Library:  # fmt: skip
    """One kernel with its function constants by the name the shader uses, compiled and loaded.

    ``alone``: without the other kernels, which may have further constants.  Those of a test's own ``source`` are few
    and small: one library has them all, unless it is said.
    """
    items, alone = tuple(sorted(constants.items())), source is None if alone is None else alone
    return _load(kernel, items, source, act, metal, checked, resolve, tuple(flags), alone)


@cache
def _load(
    kernel: str, constants: tuple[tuple[str, Any], ...], own_source: str | None, act: str, metal: int, checked: bool,
    resolve: Resolver | None, flags: tuple[str, ...], alone: bool,
) -> Library:  # fmt: skip
    source = own_source or shader_source(act)
    translated = translation(source, metal, checked, resolve)
    names = [e.name for e in translated.entries]
    if kernel not in names:
        raise AssertionError(f"the shaders have no kernel {kernel!r}; they have {', '.join(names) or 'none'}")
    library = runtime_path()
    command = [
        *the_compiler().command, *_flags(checked), *flags, "-include-pch", str(_precompiled(checked, flags)), "-shared",
        str(library), f"-Wl,-rpath,{library.parent}", "-Wl,-z,defs", "-lm",
    ]  # fmt: skip
    made = host_source(translated, {kernel} if alone else None, dict(constants))
    path = _compile(made.text, ".so", command, kernel if alone else "source")
    runtime()
    handle = ctypes.CDLL(str(path))
    table = (_Kernel * (len(names) + 1)).in_dll(handle, "msl_kernels")
    k = next(row for row in table if row.name == kernel.encode())
    arguments = [k.arguments[i] for i in range(k.argument_count)]
    described = tuple((a.kind, a.index, bool(a.readonly), a.name.decode()) for a in arguments)
    library_of_kernel = Library(path, k.entry, k.max_threads, described, made.statements, handle)
    _loaded.append(library_of_kernel)
    return library_of_kernel


_loaded: list[Library] = []


def loaded_libraries() -> list[Library]:
    """All kernels that this process has loaded."""
    return list(_loaded)


def located(report: str) -> str:
    """A report with the line of the shader in place of ``@library+offset``."""
    m = re.search(r"@(\S+)\+(0x[0-9a-f]+): ", report)
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line-19")
    if not m or not tool:
        return report
    said = subprocess.run([tool, "-i", "-e", m[1], m[2]], capture_output=True, text=True).stdout.splitlines()
    # The innermost place that is no header of the emulator: where the shader says it.
    places = [p.split(" ")[0] for p in said if p and "?" not in p]
    place = next((p for p in places if "/msl_" not in p), places[0] if places else "")
    return report.replace(m[0], f"{Path(place).name}: " if place else "")
