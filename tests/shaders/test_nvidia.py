# SPDX-License-Identifier: Apache-2.0
"""The way of the shaders to an NVIDIA GPU, as far as it goes without one: CUDA sources, recording, comparison.

What ran on a GPU is told in shaders/README.md.
"""

from __future__ import annotations

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import msl_harness
import numpy as np
import pytest
from msl_build import shader_source
from msl_harness import needs_emulator, run
from nvidia import record, replay

from lily.kernels import KERNELS
from lily.msl.cuda import cuda_source
from lily.msl.preprocess import metal_defines, preprocess
from lily.msl.translate import Options, translate


def test_every_kernel_becomes_a_cuda_function_with_its_threads():
    translated = translate(preprocess(shader_source(), "s.metal", metal_defines(320)), Options(target="cuda"))
    names = {entry.name for entry in translated.entries}
    assert names == set(KERNELS)
    for name in names:
        text = cuda_source(translated, [name], {"C_BITS": 4})
        assert re.findall(r'extern "C" __global__ void(?: __launch_bounds__\(.*\))? (\w+)\(', text) == [name]
        bounded, row = "__launch_bounds__" in text, KERNELS[name]
        assert bounded or (not row.matrix and (row.threads or row.max_threads == 1024))
    assert "C_BITS" in cuda_source(translated, ["gemm"], {"C_BITS": 4})


@needs_emulator
def test_what_is_recorded_can_be_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(record, "_recorded", kept)
    monkeypatch.setattr(record, "FOLDER", tmp_path / "nvidia")
    monkeypatch.setattr(msl_harness, "recorder", record.record)
    src = np.arange(64, dtype=np.uint8)
    for _ in range(3):
        run("copy", {"src": src, "dst": np.zeros(64, np.uint8)}, {"bytes": 64}, threads=(32,))
    record.write(record.chosen(kept))
    recorded = pickle.loads(gzip.decompress((tmp_path / "nvidia" / "calls.gz").read_bytes()))
    assert len(recorded["lists"]) == record.KEPT
    (call,) = recorded["lists"][0]["calls"]
    assert call["key"] == ("copy", (), "bf16")
    assert [(a["name"], a["access"], a["data"].size) for a in call["arguments"]] == [("src", "r", 64), ("dst", "w", 64)]
    assert np.array_equal(call["results"]["dst"], src)
    assert 'extern "C"' in recorded["sources"][call["key"]]


def raw(values: Any, dtype: Any = np.float32) -> Any:
    return np.asarray(values, np.float32).astype(dtype).reshape(-1).view(np.uint8)


SAME = [
    (raw([1, -2, 3]), raw([1, -2, 3 * (1 + 5e-6)]), "float32"),
    (raw([1, np.nan, np.inf]), raw([1 + 1e-6, np.nan, np.inf]), "float32"),
    (raw([1, 256], ml_dtypes.bfloat16), raw([1, 258], ml_dtypes.bfloat16), "bfloat16"),
    (raw([]), raw([]), "float32"),
]
DIFFERENT = [
    (raw([1, -2, 3]), raw([1, -2, 3.001]), "float32"),
    (raw([1, np.nan]), raw([np.nan, 1]), "float32"),
    (raw([1, np.inf]), raw([1, -np.inf]), "float32"),
    (raw([1, 256], ml_dtypes.bfloat16), raw([1, 262], ml_dtypes.bfloat16), "bfloat16"),
    (np.array([5, 6], np.int32).view(np.uint8), np.array([5, 7], np.int32).view(np.uint8), "int32"),
    (np.array([2.0, 0], np.float32).view(np.uint8), np.array([0x40000000, 7], np.int32).view(np.uint8), "float32"),
]


@pytest.mark.parametrize(("got", "want", "dtype"), SAME)
def test_rounding_passes(got, want, dtype):
    assert replay.compare(got, want, dtype)[0] == ""


@pytest.mark.parametrize(("got", "want", "dtype"), DIFFERENT)
def test_a_difference_is_told(got, want, dtype):
    assert replay.compare(got, want, dtype)[0] != ""
