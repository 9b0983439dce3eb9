# SPDX-License-Identifier: Apache-2.0
"""Runs shaders on the metal device: the GPU on a Mac, elsewhere the shim on the stand-in with the emulator below.

The device backend of msl_harness.py.  On a Mac this is the library of ``make build`` and Apple's compiler; pipelines
are kept in build/metal between runs.  On Linux it proves, in slow motion, that this backend and the shim are right.
Not handled: what only the emulator can do: orders, checks of every access, counts, sources of a test's own.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from kernel_calls import Array, Call, run_calls
from metal.engine import emulated_metal
from metal.toolchain import CACHE
from msl_build import shader_source
from msl_compiler import MISSING, compiler

from lily.device.device import Device

ON_A_MAC = sys.platform == "darwin"
SKEW = 16  # a device is promised no coarser alignment
FAMILY = 9  # of the stand-in's GPU: the first with bfloat arithmetic
TENSOR_UNITS = {"family": 10, "macos": 26.2}  # what the stand-in says for metal=400


def run_on_device(calls: Sequence[Call], act: str, metal: int, poison: int | None) -> list[dict[str, Array]]:
    """What each call's kernel may have written; skips where the device cannot be had, or not with ``metal``."""
    with _device(act, metal) as device:
        return run_calls(device, calls, poison=poison, skew=SKEW, timeout=600)


@cache
def matrix_operands(metal: int) -> str:
    """bf16 or f32: what the matrix units multiply."""
    with _device("bf16", metal) as device:
        return "f32" if str(device.info["matrix"]).startswith("simdgroup float") else "bf16"


@contextmanager
def _device(act: str, metal: int) -> Iterator[Device]:
    options: dict[str, object] = {"source": _source(act), "msl": "auto" if metal >= 400 else "3.2"}
    with _gpu(act, metal, options) if ON_A_MAC else _stand_in(metal, options) as device:
        matrix = str(device.info["matrix"])
        if metal >= 400 and not matrix.startswith("tensor"):
            pytest.skip(f"this GPU or its system has no tensor operations: {matrix}")
        yield device


@contextmanager
def _gpu(act: str, metal: int, options: dict[str, object]) -> Iterator[Device]:
    """The GPU, opened once a session for each language: Metal compiles the whole source."""
    key = (act, metal)
    if key not in _open:
        _open[key] = Device("metal", cache=_folder("pipelines"), **options)
        atexit.register(_open[key].close)
    yield _open[key]


_open: dict[tuple[str, int], Device] = {}


@contextmanager
def _stand_in(metal: int, options: dict[str, object]) -> Iterator[Device]:
    """Opened anew each time: the stand-in's state is global, and other tests reset it."""
    if compiler() is None:
        pytest.skip(MISSING)
    with emulated_metal(CACHE, **options) as s:
        s.set(**(TENSOR_UNITS if metal >= 400 else {"family": FAMILY}))
        with Device("metal") as device:
            yield device


@cache
def _source(act: str) -> Path:
    """A file with what a Metal compiler gets."""
    path = _folder("sources") / f"shaders-{act}.{os.getpid()}.metal"
    path.write_text(shader_source(act))
    atexit.register(path.unlink, missing_ok=True)
    return path


def _folder(name: str) -> Path:
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
