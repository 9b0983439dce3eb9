# SPDX-License-Identifier: Apache-2.0
"""The CPU device of another processor, under qemu-user: kernels for aarch64 tested on an x86-64 machine.

``EmulatedDevice`` has the part of ``lily.device.device.Device`` that kernel tests use.  The library is compiled with a
cross gcc, or with zig where there is none, and driven through tests/cpu/kernel_server.c.
Not handled: speed, timing, engines.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from needs import QEMU
from paths import ROOT

from lily.device.device import pack_params
from lily.errors import DeviceError
from lily.kernels import c_header
from lily.plan.views import Plan

EMULATOR = "qemu-aarch64"
FLAGS = ["-O2", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Werror"]


def missing_tools() -> str:
    """What this machine lacks for running aarch64 code, with the remedy; empty if nothing."""
    return "" if shutil.which(EMULATOR) else QEMU


def zig_cross_compiler() -> list[str]:
    """zig's clang for aarch64; what it makes is linked statically, as qemu has no C library for it."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", "-fno-sanitize=all"]


def cross_compiler() -> list[str]:
    """A C compiler for aarch64: gcc where it is installed, which may compile the same code in another way, or zig."""
    gcc = shutil.which("aarch64-linux-gnu-gcc")
    return [gcc, "-static"] if gcc else zig_cross_compiler()


def build_server(folder: Path) -> Path:
    """tests/cpu/kernel_server.c with the CPU device's sources, for aarch64."""
    (folder / "kernel_params.h").write_text(c_header())
    cpu = ROOT / "lily" / "cpu"
    sources = [*(cpu / "runtime").glob("*.c"), cpu / "paths" / "isa_neon.c", cpu / "paths" / "isa_portable.c"]
    sources += [*(ROOT / "objc_shim").glob("device_*.c"), ROOT / "tests" / "cpu" / "kernel_server.c"]
    compiler = cross_compiler()
    includes = [f"-I{ROOT / 'objc_shim'}", f"-I{folder}"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([*compiler, *FLAGS, *includes, "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    server = folder / "kernel_server"
    subprocess.run([*compiler, *map(str, objects), "-o", str(server), "-pthread", "-lm"], check=True)
    return server


class EmulatedBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = np.zeros(nbytes, np.uint8)

    def array(self, dtype: Any, count: int = -1) -> Any:
        whole = self.bytes[: self.nbytes // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)
        return whole if count < 0 else whole[:count]

    def free(self) -> None:
        pass


@dataclass
class EmulatedList:
    plan: Plan
    buffers: Mapping[str, EmulatedBuffer]

    def free(self) -> None:
        pass


class EmulatedDevice:
    """A device in an emulated process."""

    def __init__(self, server: Path, **options: object) -> None:
        text = "\n".join(f"{k}={v}" for k, v in options.items())
        command = [EMULATOR, str(server), text]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        self.info = dict(line.split("=", 1) for line in self._text().splitlines())

    def close(self) -> None:
        self._in.close()
        self._process.wait()
        self._out.close()

    def __enter__(self) -> EmulatedDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _text(self) -> str:
        (length,) = struct.unpack("<I", self._out.read(4))
        return self._out.read(length).decode()

    def buffer(self, nbytes: int) -> EmulatedBuffer:
        return EmulatedBuffer(nbytes)

    def record(self, plan: Plan, buffers: Mapping[str, EmulatedBuffer]) -> EmulatedList:
        return EmulatedList(plan, buffers)

    def submit(self, lists: Iterable[EmulatedList]) -> int:
        """Runs the lists at once."""
        for item in lists:
            self._run(item)
        return 1

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        return True

    def _run(self, item: EmulatedList) -> None:
        index = {name: i for i, name in enumerate(item.buffers)}
        parts = [struct.pack("<I", len(index))]
        for buffer in item.buffers.values():
            parts += [struct.pack("<Q", len(buffer.bytes)), buffer.bytes.tobytes()]
        parts.append(struct.pack("<I", len(item.plan.dispatches)))
        for d in item.plan.dispatches:
            name, params = d.kernel.name.encode(), pack_params(d.kernel, d.params)
            parts += [struct.pack("<I", len(name)), name]
            parts.append(struct.pack(f"<I{len(d.constants)}i", len(d.constants), *d.constants))
            parts.append(struct.pack("<I", len(d.views)))
            parts += [struct.pack("<IQ", index[v.buffer], v.offset) for v in d.views]
            parts += [struct.pack("<I", len(params)), params, struct.pack("<3II", *d.grid, d.barrier)]
        self._in.write(b"".join(parts))
        self._in.flush()
        error = self._text()
        if error:
            raise DeviceError(error)
        for buffer in item.buffers.values():
            buffer.bytes[:] = np.frombuffer(self._out.read(len(buffer.bytes)), np.uint8)


@cache
def open_emulated(isa: str = "neon", threads: int = 2) -> EmulatedDevice:
    """A device of one server build for all tests of this process."""
    return EmulatedDevice(_server(), isa=isa, threads=threads)


@cache
def _server() -> Path:
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    return build_server(Path(folder.name))


_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends
