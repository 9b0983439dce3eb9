# SPDX-License-Identifier: Apache-2.0
"""Which device and which of its paths are chosen on this machine, and why, in words; what to do if none opens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lily.checks.cases import ROUNDING_ISAS
from lily.device.device import ABI_VERSION, Device
from lily.device.kinds import KINDS, choose_device, kind_of, library_path
from lily.doctor.machine import fingerprint
from lily.errors import DeviceError
from lily.msl.flatten import flatten
from lily.units import gb

_PACKAGE = Path(__file__).parents[1]

Way = tuple[str, str, str]  # what, its value, why


def chosen(requested: str) -> dict[str, Any]:
    """The device that ``requested`` means here; nothing is opened."""
    name = choose_device(requested)
    why = "asked for"
    if requested == "auto":
        why = f"auto is {name} on {'macOS' if sys.platform == 'darwin' else 'this system'}, without falling back"
    return {"requested": requested, "name": name, "why": why, "environment": environment()}


def environment() -> dict[str, str]:
    """Variables that change what is chosen."""
    names = (name for kind in KINDS.values() for name in kind.variables)
    return {name: os.environ[name] for name in names if name in os.environ}


def opened(device: Device) -> dict[str, Any]:
    """What an open device says about itself, and its ways with reasons."""
    info = device.info
    ways = _gpu_ways(info) if kind_of(device.name).gpu else _cpu_ways(info)
    return {
        "info": info,
        "library": _library(device.name),
        "abi": ABI_VERSION,
        "ways": [{"what": what, "value": value, "why": why} for what, value, why in ways],
    }


def remedy(name: str, error: str) -> str:
    """What to do about a device that does not open."""
    kind, steps = kind_of(name), []
    if "make build" not in error and "missing" in error:
        steps.append("build the device libraries with `make build`, or install the wheel for this system")
    if not kind.here:
        steps.append(kind.needs)
    if kind.gpu and "--device cpu" not in error:
        steps.append("use --device cpu to run on the processor")
    if kind.gpu and kind.here:
        steps.append("please send this report (lily doctor --json)")
    return "; ".join(steps) or "please send this report (lily doctor --json)"


def _library(name: str) -> str | None:
    try:
        return library_path(name).relative_to(_PACKAGE.parent).as_posix()
    except (DeviceError, ValueError):
        return None  # another build of it, given by path


def _cpu_ways(info: dict[str, str | int]) -> list[Way]:
    forced = os.environ.get("LILY_CPU")
    isas = str(info.get("isas", ""))
    rounds = info.get("isa") in ROUNDING_ISAS
    return [
        ("instruction set", str(info.get("isa")),
         f"LILY_CPU={forced}" if forced else f"the first of what this processor has: {isas}"),
        ("activations", "float32", "rounded to bfloat16 for products with 4-bit matrices" if rounds else "as they are"),
        ("threads", str(info.get("threads")), "one for each usable processor, unless --threads says otherwise"),
    ]  # fmt: skip


def _gpu_ways(info: dict[str, str | int]) -> list[Way]:
    matrix, _, why_not = str(info.get("matrix", "")).partition(", ")
    reasons = {
        "tensor": "this GPU has units for tensor operations, and the system's compiler takes them",
        "simdgroup bfloat": "tensor operations are for family Apple10 and macOS 26.2 or later",
        "simdgroup float": "this GPU has no bfloat arithmetic (before family Apple9)",
        "as compiled": "the metallib decides",
    }
    memory, largest = (gb(int(info[name])) for name in ("memory", "max_buffer"))
    shown: list[Way] = [
        ("GPU", str(info.get("chip")), f"family {info.get('family')}"),
        ("memory of the GPU", memory, f"at most {largest} in one buffer"),
        ("shaders", str(info.get("shaders")), f"MSL {info.get('msl')}, text {fingerprint(flatten())}"),
        ("matrix unit", matrix, why_not or reasons.get(matrix, "")),
        ("pipeline cache", str(info.get("cache")), f"{info.get('cache_hits')} of {info.get('pipelines')} were in it"),
        ("residency set", str(info.get("residency")), "keeps weights in the GPU's memory between requests"),
        ("longest command buffer", f"{info.get('slice_ms')} ms", "for macOS's watchdog"),
    ]
    return [way for way in shown if "None" not in way[1]]
