# SPDX-License-Identifier: Apache-2.0
"""Runs single kernels of a device on numpy arrays, for the kernel tests: devices, structures, bf16.

Guard zones and read-only arguments are checked (kernel_calls.py).  Not handled: whole plans (tests of the engine).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from kernel_calls import Array, Call, run_calls
from paths import ROOT

from lily.device.device import Device
from lily.device.kinds import library_path
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.structs import REQUEST, STEP


def step(position: int = 0, rows: int = 1, count: int = 0, stopped: int = 0) -> Array:
    """One Step structure."""
    return np.array([(position, rows, count, stopped)], STEP)


def request(vocab: int, **fields: Any) -> Array:
    """One Request structure, everything off unless named."""
    out = np.zeros(1, REQUEST)
    for name, value in {"top_p": 1, "repetition_penalty": 1, "vocab": vocab, **fields}.items():
        out[name] = value
    return out


@cache
def open_device(isa: str = "auto", threads: int = 2, name: str = "cpu") -> Device:
    """The device, opened once a session; its library is built if it is missing.

    The variable LILY_CPU_LIBRARY names another build of it, with a sanitizer for instance.
    """
    if name == "cpu" and os.environ.get("LILY_CPU_LIBRARY"):
        return Device(name, library=Path(os.environ["LILY_CPU_LIBRARY"]), isa=isa, threads=threads)
    try:
        library_path(name)
    except DeviceError:
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
    return Device(name, isa=isa, threads=threads)


@cache
def isa_paths() -> list[str]:
    """The instruction-set paths that this machine can run."""
    return open_device().info["isas"].split(",")


def fill(shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
    """An output before the kernel ran: NaN, or a large integer."""
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max // 3, dtype)


def run(
    device: Device,
    name: str,
    args: Mapping[str, Array],
    params: Mapping[str, int | float] | None = None,
    constants: Mapping[str, int] | None = None,
    grid: Sequence[int] = (1,),
) -> dict[str, Array]:
    """Runs kernel ``name`` once and returns its written arguments, by name, in the given shapes and dtypes.

    Arguments that share one array share its memory.  AssertionError if the kernel wrote where it must not.
    """
    return run_call(device, Call(name, args, params or {}, constants or {}, grid))


def run_call(device: Device, call: Call) -> dict[str, Array]:
    """Runs one call as ``run`` does."""
    written = {a.name for a in KERNELS[call.kernel].args if a.writes}
    out = run_calls(device, [call])[0]
    return {name: array for name, array in out.items() if name in written}


# ---- bf16 -----------------------------------------------------------------------------------------------------------


def to_bf16(x: Array) -> Array:
    """float32 to bf16 bits, to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(h: Array) -> Array:
    """bf16 bits to float32."""
    return (h.astype(np.uint32) << 16).view(np.float32)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bytes: -0 differs from 0, and equal NaNs are equal."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
