# SPDX-License-Identifier: Apache-2.0
"""Runs what record.py wrote down on an NVIDIA GPU and compares: the shaders on a real GPU, whose threads really race.

    python tests/nvidia/replay.py                                       # on a machine with nvcc, numpy and CuPy
    compute-sanitizer --tool racecheck python tests/nvidia/replay.py    # also memcheck, synccheck

Whole numbers have to be equal, and so has where numbers are not finite; others are equal up to the order of sums.
What lies around the arrays must not change.  Exit code 1: something differs.
Needs nothing of Lily but the headers in lily/msl/include.
"""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "nvidia"
ARCHITECTURE = "native"
COMPILERS = 16

GUARD, GUARD_BYTE = 512, 0xA5
LAUNCH = np.dtype([("buffers", "<u8", (31,)), ("threadgroup_offset", "<u4", (8,))])  # MslCudaLaunch of msl_cuda.h

# Of an element and of the root mean square of all: a float32 sum in another order, and where that lets a bfloat16 fall
# to the other side of a rounding, a step of it.
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (2.0**-7, 1e-4)}
SMALLEST = {"float32": 2.0**-126, "bfloat16": 0.0}  # below it a number is none


def main() -> int:
    import cupy

    with gzip.open(FOLDER / "calls.gz") as file:
        recorded = pickle.load(file)
    kernels = load(recorded["sources"], cupy)
    problems, worst = [], dict.fromkeys(sorted({key[0] for key in kernels}), 0.0)
    for item in recorded["lists"]:
        for call, result in zip(item["calls"], run(item, kernels, cupy), strict=True):
            for argument in call["arguments"]:
                name = argument["name"]
                if name in call["results"]:
                    text, error = compare(result[name], call["results"][name], argument["dtype"])
                    worst[call["key"][0]] = max(worst[call["key"][0]], error)
                    problems += [f"{call['key']}: {name}: {text}"] if text else []
            problems += [f"{call['key']}: {name}: written around it" for name in result["damaged"]]
    for kernel, error in worst.items():
        print(f"{kernel:24} {error:.1e}")
    print(f"{len(recorded['lists'])} lists, {len(kernels)} kernels with their constants, {len(problems)} problems")
    print("\n".join(problems[:40]))
    return 1 if problems else 0


def load(sources: Mapping[Any, str], cupy: Any) -> dict[Any, Any]:
    """The kernels by their key, compiled by nvcc."""

    def build(numbered: tuple[int, str]) -> Path:
        number, text = numbered
        source, target = FOLDER / f"{number}.cu", FOLDER / f"{number}.cubin"
        if not target.exists() or source.read_text() != text:
            source.write_text(text)
            flags = ["-std=c++20", f"-arch={ARCHITECTURE}", "-cubin", "-w", "--expt-relaxed-constexpr"]
            include = str(ROOT / "lily" / "msl" / "include")
            subprocess.run(["nvcc", *flags, "-I", include, "-o", str(target), str(source)], check=True)
        return target

    with ThreadPoolExecutor(COMPILERS) as pool:
        paths = list(pool.map(build, enumerate(sources.values())))
    return {key: cupy.RawModule(path=str(path)).get_function(key[0]) for key, path in zip(sources, paths, strict=True)}


def run(item: Mapping[str, Any], kernels: Mapping[Any, Any], cupy: Any) -> list[dict[str, Any]]:
    """For each call of the list its arrays afterwards, by name, and names of those around which was written."""
    memory, size = {}, {}
    for call in item["calls"]:
        for a in call["arguments"]:
            if a["data"] is not None:
                host = np.full(a["data"].nbytes + 2 * GUARD, GUARD_BYTE, np.uint8)
                fill = item["poison"] if a["access"] == "w" else None
                host[GUARD : len(host) - GUARD] = a["data"] if fill is None else fill
                memory[a["place"]], size[a["place"]] = cupy.asarray(host), a["data"].nbytes
    for call in item["calls"]:
        launch = np.zeros(1, LAUNCH)
        params = cupy.asarray(np.frombuffer(call["params"] or b"\0", np.uint8))
        addresses = [memory[a["place"]].data.ptr + GUARD for a in call["arguments"]] + [params.data.ptr]
        launch["buffers"][0, : len(addresses)] = addresses
        kernels[call["key"]](call["grid"], call["threads"], (launch[0],))
        cupy.cuda.runtime.deviceSynchronize()
    after = {place: array.get() for place, array in memory.items()}
    results = []
    for call in item["calls"]:
        result: dict[str, Any] = {"damaged": []}
        for a in call["arguments"]:
            raw, end = after[a["place"]], GUARD + size[a["place"]]
            result[a["name"]] = raw[GUARD:end]
            if (raw[:GUARD] != GUARD_BYTE).any() or (raw[end:] != GUARD_BYTE).any():
                result["damaged"].append(a["name"])
        results.append(result)
    return results


def compare(got: Any, want: Any, dtype: str) -> tuple[str, float]:
    """(what is wrong, or nothing; greatest error relative to the root mean square of ``want``) of two arrays' bytes."""
    if np.array_equal(got, want):
        return "", 0.0
    if dtype not in LIMITS:
        return f"{np.count_nonzero(got != want)} of {got.size} bytes differ", float("inf")
    x, y = floats(got, dtype), floats(want, dtype)
    finite = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), finite) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return "other elements are not finite", float("inf")
    x, y = x[finite], y[finite]
    ids = (y != 0) & (np.abs(y) < SMALLEST[dtype])  # which some arrays hold among numbers, as bits
    if not np.array_equal(x[ids], y[ids]):
        return "ids differ", float("inf")
    if not y.size:
        return "", 0.0
    error, rms = np.abs(x - y), float(np.sqrt((y**2).mean()))
    own, common = LIMITS[dtype]
    wrong = np.count_nonzero(error > own * np.abs(y) + common * rms)
    relative = float(error.max()) / max(rms, 1e-30)
    return (f"{wrong} of {y.size} elements differ, by {relative:.1e} at most" if wrong else ""), relative


def floats(raw: Any, dtype: str) -> Any:
    """float64 values of an array's bytes."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.float32).astype(np.float64)


if __name__ == "__main__":
    sys.exit(main())
