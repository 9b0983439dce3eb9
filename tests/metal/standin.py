# SPDX-License-Identifier: Apache-2.0
"""Python's side of the stand-in for Metal (standin.h): what it pretends to be, what it saw, what runs its kernels.

Not handled: several stand-ins in one process; its state is global, ``reset`` between tests.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from metal.toolchain import Missing, gnustep_library
from waiting import PATIENCE

BUFFER = 1  # kind of an argument in tests/emulator/msl_bind.h


class Kernel(ctypes.Structure):
    """standin_kernel."""

    _fields_ = (
        ("entry", ctypes.c_void_p), ("max_threads", ctypes.c_uint32), ("writable", ctypes.c_uint32),
        ("arguments", ctypes.c_uint32), ("language", ctypes.c_uint32),
    )  # fmt: skip


_U32S, _I32S = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_int32)
_COMPILE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, _U32S, _I32S, ctypes.POINTER(Kernel),
    ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip


class _Backend(ctypes.Structure):
    _fields_ = (
        ("compile", _COMPILE),
        *((n, ctypes.c_void_p) for n in ("dispatch", "barrier", "view", "region_new", "region_free")),
        *((n, ctypes.c_void_p) for n in ("reports", "clear_reports")),
    )


class Source(str):
    """Text of a library, and the version of the language in which it is compiled: 320, 400 …; 0 if it is not known."""

    metal: int = 0


# source, kernel, {index: value} → Kernel; raises AssertionError with the compiler's words.
Compiler = Callable[[Source, str, dict[int, int]], Kernel]


class Standin:
    """The library, loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib: Any = ctypes.CDLL(str(path))
        for name in ("journal", "complaints", "live"):
            getattr(self.lib, f"standin_{name}").restype = ctypes.c_char_p
        self.lib.standin_launch_bytes.restype = ctypes.c_uint64
        self.lib.standin_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._backend = _Backend()
        self.reset()

    def reset(self) -> None:
        """Ordinary behaviour, no journal, no complaints, nothing that runs kernels."""
        self.lib.standin_reset()
        self._backend = _Backend()
        self.lib.standin_run_with(ctypes.byref(self._backend))

    @contextmanager
    def held(self) -> Iterator[Callable[[], bool]]:
        """Within it no command buffer gets further than its beginning, unless it takes longer than PATIENCE.

        Yields whether that still holds.
        """
        self.set(hold=1)
        net = threading.Timer(PATIENCE, self.set, kwargs={"hold": 0})
        net.start()
        try:
            yield net.is_alive
        finally:
            net.cancel()
            self.set(hold=0)

    def set(self, **values: float | str) -> None:
        """Changes numbers of STANDIN_NUMBERS, or fail_text."""
        for key, value in values.items():
            if key == "fail_text":
                self.lib.standin_fail_text(str(value).encode())
            elif self.lib.standin_set(key.encode(), float(value)):
                raise KeyError(key)

    @property
    def journal(self) -> list[str]:
        return self.lib.standin_journal().decode().splitlines()

    @property
    def complaints(self) -> list[str]:
        """Rules of Metal that were broken."""
        return self.lib.standin_complaints().decode().splitlines()

    @property
    def live(self) -> dict[str, int]:
        """Objects that exist, by kind."""
        pairs = (line.rsplit(" ", 1) for line in self.lib.standin_live().decode().splitlines())
        return {kind: int(count) for kind, count in pairs}

    def run_kernels(self, compile: Compiler, runtime: Any = None) -> None:
        """Compiles kernels with ``compile`` and runs them on the emulator's ``runtime`` (none: they run nothing)."""

        def call(
            source: bytes, name: bytes, count: int, index: Any, value: Any, out: Any, error: int, room: int
        ) -> int:
            try:
                text = Source(source.decode())
                text.metal = 100 * (out[0].language >> 16) + 10 * (out[0].language & 0xFFFF)
                out[0] = compile(text, name.decode(), {index[i]: value[i] for i in range(count)})
            except Exception as problem:
                words = str(problem).encode()[: room - 1] + b"\0"
                ctypes.memmove(error, words, len(words))
                return 1
            return 0

        self._backend = _Backend(compile=_COMPILE(call))
        if runtime is not None:
            names = {"dispatch": "msl_dispatch", "barrier": "msl_device_barrier", "view": "msl_view"}
            names |= {"region_new": "msl_region_new", "region_free": "msl_region_free"}
            names |= {"reports": "msl_reports", "clear_reports": "msl_clear_reports"}
            for field, function in names.items():
                setattr(self._backend, field, ctypes.cast(getattr(runtime, function), ctypes.c_void_p).value)
        self.lib.standin_run_with(ctypes.byref(self._backend))


@cache
def standin() -> Standin:
    """The one stand-in of this process; with LILY_SHIM_COVERAGE=1 it counts the shim's lines."""
    return Standin(gnustep_library(coverage=os.environ.get("LILY_SHIM_COVERAGE") == "1"))


def require_standin() -> Standin:
    """The stand-in; skips the test where it cannot be built."""
    try:
        return standin()
    except Missing as problem:
        pytest.skip(str(problem))


def emulate(s: Standin, checked: bool = False) -> None:
    """Runs kernels as the emulator of the shader tests does."""
    import msl_build
    import msl_harness

    from lily.msl.flatten import constant_index, constant_name

    names = {i: constant_name(n) for n, i in constant_index().items()}
    assert s.lib.standin_launch_bytes() == ctypes.sizeof(msl_harness.Launch)

    def compile(source: Source, name: str, constants: dict[int, int]) -> Kernel:
        values = {names[i]: v for i, v in constants.items()}
        act = next((a for a in ("bf16", "f32") if source == msl_build.shader_source(a)), "bf16")
        own = None if source == msl_build.shader_source(act) else source
        metal = source.metal or 320
        library = msl_build.kernel_library(name, values, act=act, metal=metal, checked=checked, source=own, alone=True)
        buffers = [(index, readonly) for kind, index, readonly, _ in library.arguments if kind == BUFFER]
        writable = sum(1 << index for index, readonly in buffers if not readonly)
        return Kernel(library.entry, library.max_threads, writable, sum(1 << index for index, _ in buffers))

    s.set(checked=checked, workers=msl_harness.HOST_THREADS)
    s.run_kernels(compile, msl_build.runtime())
