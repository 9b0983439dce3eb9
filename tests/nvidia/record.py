# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes down what the tests of the shaders run on the emulator, to be run again on a real GPU.

    PYTHONPATH=tests .venv/bin/python -m pytest -p nvidia.record tests/test_shaders_*.py

fills ``build/nvidia`` with the calls, their results, and a CUDA source for each kernel with its constants; replay.py
takes it from there.  Of the calls of one kernel the smallest are kept, so that the folder stays small.
Not handled: tensor operations, which CUDA has no like of here; sources of the tests' own.
"""

from __future__ import annotations

import gzip
import pickle
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import msl_harness
import numpy as np
import pytest
from kernel_calls import Call
from msl_build import shader_source
from paths import ROOT

from lily.device.device import pack_params
from lily.kernels import KERNELS
from lily.msl.cuda import cuda_source
from lily.msl.flatten import constant_name
from lily.msl.preprocess import metal_defines, preprocess
from lily.msl.translate import Options, translate

FOLDER = ROOT / "build" / "nvidia"
KEPT = 2  # lists of calls for each kernel with its constants
LARGEST = 16 << 20  # bytes of all calls and results

Key = tuple[str, tuple[tuple[str, int], ...], str]  # kernel, constants, type of activations
Recorded = dict[str, Any]

_recorded: list[Recorded] = []


def pytest_configure(config: pytest.Config) -> None:
    msl_harness.recorder = record


def pytest_unconfigure(config: pytest.Config) -> None:
    msl_harness.recorder = None
    if _recorded:
        write(chosen(_recorded))


def record(calls: Sequence[Call], results: Sequence[msl_harness.Run], options: Mapping[str, Any]) -> None:
    """Keeps a list of calls that ran without reports; shared arrays stay shared."""
    if options["source"] is not None or options["metal"] != 320 or any(r.reports for r in results):
        return
    places: dict[int, int] = {}
    entries = [_entry(c, r, options["act"], places) for c, r in zip(calls, results, strict=True)]
    nbytes = sum(a["data"].nbytes for e in entries for a in e["arguments"] if a["data"] is not None)
    nbytes += sum(v.nbytes for e in entries for v in e["results"].values())
    _recorded.append({"calls": entries, "poison": options["poison"], "nbytes": nbytes})


def _entry(call: Call, result: msl_harness.Run, act: str, places: dict[int, int]) -> Recorded:
    row, arguments = KERNELS[call.kernel], []
    for a in row.args:
        array = call.arrays[a.name]
        known = id(array) in places
        place = places.setdefault(id(array), len(places))
        dtype = array.dtype.name if array.dtype.names is None else "record"
        data = None if known else _bytes(array)
        arguments.append({"name": a.name, "access": a.access, "dtype": dtype, "place": place, "data": data})
    values = [float(call.params[n]) if t == "f32" else int(call.params[n]) for n, t in row.params]
    return {
        "key": (call.kernel, tuple(sorted(call.constants.items())), act),
        "grid": (*call.grid, 1, 1)[:3],
        "threads": (*call.threads, 1, 1)[:3],
        "params": pack_params(row, values),
        "arguments": arguments,
        "results": {name: _bytes(array) for name, array in result.arrays.items()},
    }


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()


def chosen(recorded: Sequence[Recorded]) -> list[Recorded]:
    """The smallest lists, as many as the limits allow, every kernel with its constants first."""
    seen: dict[Key, int] = {}
    found: dict[int, Recorded] = {}
    total = 0
    for kept in range(1, KEPT + 1):
        for i, item in sorted(enumerate(recorded), key=lambda entry: int(entry[1]["nbytes"])):
            keys = [call["key"] for call in item["calls"]]
            if i in found or total + item["nbytes"] > LARGEST or all(seen.get(key, 0) >= kept for key in keys):
                continue
            total += item["nbytes"]
            found[i] = item
            for key in keys:
                seen[key] = seen.get(key, 0) + 1
    return list(found.values())


def write(items: Sequence[Recorded]) -> None:
    """The lists, and the sources that they need."""
    keys = sorted({call["key"] for item in items for call in item["calls"]})
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    translated = {
        act: translate(preprocess(shader_source(act), "source.metal", metal_defines(320)), Options(target="cuda"))
        for act in {act for _, _, act in keys}
    }
    sources = [
        cuda_source(translated[act], [kernel], {constant_name(n): value for n, value in constants})
        for kernel, constants, act in keys
    ]
    with gzip.open(FOLDER / "calls.gz", "wb") as file:
        pickle.dump({"lists": list(items), "sources": dict(zip(keys, sources, strict=True))}, file)
    print(f"\n{len(items)} lists of calls of {len(keys)} kernels with their constants are in {FOLDER}")
