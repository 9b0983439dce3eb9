# SPDX-License-Identifier: Apache-2.0
"""Compiles the Metal shim without a Mac: for macOS with zig, and for Linux with GNUstep and the stand-in for Metal.

Apple's headers are generated from metal-cpp, which is inside the wheel ``mlx-metal``: pip downloads it once into
build/metal (``LILY_METAL_CPP`` names a folder to use in its place).  Results are kept there by the hash of their
inputs.  ``Missing`` says what a machine lacks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from published import publish, publishing

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "metal"
SHIM = ROOT / "objc_shim"

METAL_CPP_WHEEL = "mlx-metal==0.32.4"
TARGET = "aarch64-macos.15.0"
# A misspelt message, or an argument of another type, is an error; the generated headers know every one.
STRICT = ["-Werror=objc-method-access", "-Werror=incompatible-pointer-types", "-Wall", "-Wextra", "-Werror"]
COMMON = ["-std=c11", "-fblocks", "-fPIC", "-fvisibility=hidden"]
GNUSTEP = [
    "-fobjc-runtime=gcc", "-fconstant-string-class=NSConstantString", "-fexceptions", "-fobjc-exceptions",
    "-D_NATIVE_OBJC_EXCEPTIONS", "-DGNUSTEP", "-DGNUSTEP_BASE_LIBRARY=1", "-DGNU_RUNTIME=1",
]  # fmt: skip
# Reasons to skip, with the remedy.
NO_GNUSTEP = (
    "no clang or no GNUstep, on which the shim runs; "
    "remedy: apt-get install clang-19 libgnustep-base-dev gobjc libblocksruntime-dev"
)
NO_PROFILE = "no tools that count the shim's lines; remedy: apt-get install llvm-19 libclang-rt-19-dev"


class Missing(Exception):
    """What is needed is not on this machine."""


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{what}:\n{done.stdout}{done.stderr}"[-8000:])


def pip_download(requirement: str, *options: str) -> Path:
    """A wheel from the package index, in build/metal/wheels; Missing if pip cannot get it."""
    name = requirement.partition("==")[0].replace("-", "_").lower()
    folder = CACHE / "wheels"
    if not (found := sorted(folder.glob(f"{name}-*.whl"))):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as own:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run([*command, *options, "--dest", own, requirement], capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"pip cannot download {requirement}: {done.stderr.strip().splitlines()[-1:]}")
            found = [wheel.replace(folder / wheel.name) for wheel in sorted(Path(own).glob(f"{name}-*.whl"))]
    return found[-1]


@cache
def metal_cpp() -> Path:
    """The folder with Metal/*.hpp."""
    if given := os.environ.get("LILY_METAL_CPP"):
        return Path(given)
    target = CACHE / "metal_cpp"
    if not target.exists():
        wheel = pip_download(METAL_CPP_WHEEL, "--platform", "macosx_14_0_arm64")
        with zipfile.ZipFile(wheel) as archive, publishing(target) as part:
            prefix = "mlx/include/metal_cpp/"
            for name in archive.namelist():
                if name.startswith(prefix + "Metal/") and not name.endswith("/"):
                    place = part / name.removeprefix(prefix)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(name))
    return target


@cache
def headers() -> Path:
    """A folder with the generated Metal/Metal.h and the kernel table's header."""
    from metal.metal_headers import Headers

    return publish(CACHE / "include" / "Metal" / "Metal.h", Headers(metal_cpp()).text()).parents[1]


@cache
def kernel_table() -> Path:
    """A folder with kernel_params.h."""
    from lily.kernels import c_header

    return publish(CACHE / "table" / "kernel_params.h", c_header()).parent


def _hash(files: Iterable[Path], command: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _inputs() -> list[Path]:
    folders = (SHIM, HERE, headers() / "Metal", kernel_table())
    return [p for f in folders for p in sorted(f.glob("*")) if p.suffix in (".c", ".m", ".h")]


def sources() -> list[Path]:
    """C and Objective-C files of the shim; each is compiled alone."""
    return sorted(SHIM.glob("*.[cm]"))


def _compile_all(files: Sequence[Path], folder: Path, compile_one: Callable[[Path, Path], None]) -> list[str]:
    """Object files of ``files`` in ``folder``, two at a time."""
    objects = [folder / f"{source.stem}.{os.getpid()}.o" for source in files]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, files, objects))
    return [str(path) for path in objects]


# ---- macOS --------------------------------------------------------------------------------------------------------
def zig() -> list[str]:
    """The command of zig's C compiler; Missing without the package."""
    done = subprocess.run([sys.executable, "-m", "ziglang", "version"], capture_output=True)
    if done.returncode:
        raise Missing("the package ziglang is not installed")
    return [sys.executable, "-m", "ziglang", "cc"]


def macos_compile_flags() -> list[str]:
    """What stands for Apple's SDK when the shim is compiled."""
    return [
        "-target", TARGET, *COMMON, "-O2", "-fno-objc-arc", "-I", str(SHIM), "-I", str(kernel_table()),
        "-isystem", str(headers()), "-isystem", str(HERE / "sdk"),
    ]  # fmt: skip


def macos_link_flags() -> list[str]:
    frameworks = [flag for name in ("Metal", "Foundation", "CoreFoundation") for flag in ("-framework", name)]
    return [
        "-target", TARGET, "-F", str(HERE / "sdk" / "frameworks"), "-L", str(HERE / "sdk" / "lib"), "-dynamiclib",
        "-Wl,-install_name,@rpath/liblily_metal.dylib", *frameworks, "-lobjc", "-Wl,-needed_framework,CoreGraphics",
    ]  # fmt: skip


def compile_for_macos(source: Path, target: Path) -> None:
    """An object file of a C or Objective-C source; AssertionError with the compiler's words."""
    _run([*zig(), *STRICT, *macos_compile_flags(), "-c", str(source), "-o", str(target)], f"{source.name} for macOS")


@cache
def macos_library() -> Path:
    """liblily_metal.dylib for macOS on Apple silicon."""
    flags = [*STRICT, *macos_compile_flags(), *macos_link_flags()]
    target = CACHE / _hash(_inputs(), flags) / "liblily_metal.dylib"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = _compile_all(sources(), target.parent, compile_for_macos)
        part = target.with_name(f"{os.getpid()}.part")
        _run([*zig(), *macos_link_flags(), *objects, "-o", str(part)], "linking for macOS")
        part.replace(target)
    return target


# ---- GNUstep ------------------------------------------------------------------------------------------------------
@cache
def clang() -> str:
    """A clang that knows Objective-C; Missing without one."""
    if sys.platform == "darwin":
        raise Missing("the stand-in for Metal runs where there is no Metal")
    for name in (os.environ.get("LILY_CLANG_C"), "clang-19", "clang-20", "clang-18", "clang-17", "clang"):
        path = shutil.which(name) if name else None
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"version (\d+)", said)
            if version and int(version[1]) >= 14 and "Apple" not in said:
                return path
    raise Missing(NO_GNUSTEP)


@cache
def objc_headers() -> Path:
    """GCC's Objective-C headers alone, as clang must keep its own C headers; the blocks runtime as GNUstep names it."""
    if not Path("/usr/include/GNUstep/Foundation/Foundation.h").exists():
        raise Missing(NO_GNUSTEP)
    gcc = shutil.which("gcc")
    said = subprocess.run([gcc, "-print-file-name=include"], capture_output=True, text=True).stdout if gcc else ""
    source = Path(said.strip()) / "objc"
    if not (source / "objc.h").exists() or not Path("/usr/include/Block.h").exists():
        raise Missing(NO_GNUSTEP)
    folder = CACHE / "gnustep"
    for header in source.glob("*.h"):
        publish(folder / "objc" / header.name, header.read_text())
    publish(folder / "objc" / "blocks_runtime.h", "#include <Block.h>\n")
    return folder


@cache
def gnustep_library(coverage: bool = False) -> Path:
    """The shim and the stand-in as one shared library; with ``coverage`` it counts the shim's lines."""
    found = clang()
    include = ["-isystem", str(objc_headers()), "-isystem", "/usr/include/GNUstep", "-isystem", str(headers())]
    compiler = [found, *COMMON, "-g", "-O1", *include]
    shim = [*STRICT, "-I", str(SHIM), "-I", str(kernel_table())]
    shim += ["-fprofile-instr-generate", "-fcoverage-mapping"] if coverage else []
    loose = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-protocol", "-Wno-incomplete-implementation"]
    link = [clang(), "-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", *(["-fprofile-instr-generate"] if coverage else [])]
    # GNUstep has a _Block_copy of its own, which copies nothing: the real one must be found first.
    libraries = ["-lBlocksRuntime", "-lgnustep-base", "-lobjc", "-lpthread", "-lm"]
    target = CACHE / _hash(_inputs(), [*compiler, *GNUSTEP, *shim, *loose, *link, *libraries]) / "liblily_metal.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(source: Path, built: Path) -> None:
            objective = GNUSTEP if source.suffix == ".m" else []
            command = [*compiler, *objective, *(shim if source.parent == SHIM else loose)]
            _run([*command, "-c", str(source), "-o", str(built)], f"{source.name} with GNUstep")

        objects = _compile_all([*sources(), *sorted(HERE.glob("standin_*.m"))], target.parent, compile_one)
        part = target.with_name(f"{os.getpid()}.part")
        _run([*link, *objects, *libraries, "-o", str(part)], "linking with GNUstep")
        part.replace(target)
    return target
