# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler of the emulator and the translated shaders: a clang of the system, or the one inside the zig wheel.

A clang++ of version 17 or later is taken where there is one, as its C++ library is compiled already; elsewhere the
clang of the package ``ziglang``, which every development environment has.  ``LILY_CLANG`` names another clang++, or is
``zig``.  Both get the same flags and make kernels of the same results (test_shaders_compilers.py).

Not handled: Macs, where the emulator does not link; compilers other than clang, which lack the vector types.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

NAMES = ("clang++-19", "clang++-20", "clang++-18", "clang++-17", "clang++")
OLDEST = 17  # the first with arithmetic on __bf16
MISSING = (
    "the emulator of the shaders runs on Linux only" if sys.platform == "darwin"
    else "no clang for the shaders: make setup (installs the one inside ziglang)"
)  # fmt: skip


@dataclass(frozen=True)
class Compiler:
    """``command`` compiles C++, and links what needs no C++ library; ``linker`` links what does."""

    version: str
    command: tuple[str, ...]
    linker: tuple[str, ...]


@cache
def compiler() -> Compiler | None:
    """The compiler to use; None if there is none, and on a Mac."""
    if sys.platform == "darwin":
        return None
    wish = os.environ.get("LILY_CLANG")
    if wish == "zig":
        return zig_clang()
    found = (_system_clang(name) for name in (wish, *NAMES) if name)
    return next((clang for clang in found if clang), None) or zig_clang()


def the_compiler() -> Compiler:
    """The compiler to use; AssertionError without one."""
    found = compiler()
    assert found is not None, MISSING
    return found


@cache
def system_clang() -> Compiler | None:
    """The first clang++ on the path that is new enough."""
    return next((clang for clang in map(_system_clang, NAMES) if clang), None)


@cache
def _system_clang(name: str) -> Compiler | None:
    path = shutil.which(name)
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"version (\d+)", said)
    if version is None or int(version[1]) < OLDEST:
        return None
    return Compiler(said.partition("\n")[0], (path,), (path,))


@cache
def zig_clang() -> Compiler | None:
    """The clang inside the package ``ziglang``, None without it.

    ``zig clang`` is that clang as it is: with the flags it is given, and without the cache that zig keeps for C++.
    Where its own libc++ and the C library lie it does not know; ``zig c++`` does, which compiles libc++ the first time
    that something is linked with it.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = str(Path(spec.origin).parent / "zig")
    asked = [zig, "c++", "-v", "-std=c++20", "-E", "-x", "c++", os.devnull]
    said = subprocess.run(asked, capture_output=True, text=True)
    line = next((line for line in said.stderr.splitlines() if " -cc1 " in line), None)
    assert line is not None, f"zig c++ does not say how it compiles:\n{said.stderr[-2000:]}"
    words = shlex.split(line)
    pairs = dict.fromkeys(p for p in pairwise(words) if p[0] in ("-isystem", "-D"))
    command = [
        zig, "clang", "--driver-mode=g++", f"--target={words[words.index('-triple') + 1]}",
        "-nostdinc", "-nostdinc++", "-nostdlib++", "-Wno-unused-command-line-argument",
        *(word for pair in pairs for word in pair),
        # Without it <utility> brings the C library's functions along, and a shader's fma or fabs is ambiguous.
        "-D_LIBCPP_REMOVE_TRANSITIVE_INCLUDES",
    ]  # fmt: skip
    return Compiler(f"zig {importlib.metadata.version('ziglang')}", tuple(command), (zig, "c++"))
