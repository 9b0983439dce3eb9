# SPDX-License-Identifier: Apache-2.0
"""Runs the probes of ``lily doctor`` as shaders, and holds them to integers that float32 holds exactly.

test_shaders_probe.py runs it at every edge, test_shaders_on_device.py once through the metal device.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from msl_harness import Run, run


def level(**options: Any) -> Run:
    out = run("probe_level", {"x": np.array([41, 7, 7, 7], np.uint32)}, threads=(32,), **options)
    np.testing.assert_array_equal(out["x"], [42, 7, 7, 7])
    return out


def read(size: int, block: int, threads: int, **options: Any) -> Any:
    src = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    groups = -(-size // block)
    out = run(
        "probe_read", {"src": src, "sums": np.zeros(groups, np.uint32)}, {"bytes": size, "block": block},
        grid=(groups,), threads=(threads,), **options,
    )  # fmt: skip
    padded = np.concatenate([src, np.zeros(-size % block, np.uint8)]).view(np.uint32).reshape(groups, -1)
    np.testing.assert_array_equal(out["sums"], padded.sum(1, dtype=np.uint32))
    return out


def matrix(rounds: int, groups: int = 2, act: str = "bf16", **options: Any) -> None:
    r = np.random.default_rng(rounds)
    dtype = np.float32 if act == "f32" else ml_dtypes.bfloat16
    x, w = r.integers(-8, 9, (2, 64, 64)).astype(dtype)
    arrays = {"x": x, "w": w, "y": np.zeros((groups, 64, 64), np.float32)}
    out = run("probe_matrix", arrays, {"rounds": rounds}, grid=(groups,), threads=(128,), act=act, **options)
    want = rounds * (x.astype(float) @ w.astype(float).T)
    np.testing.assert_array_equal(out["y"], np.broadcast_to(want, (groups, 64, 64)))
