# SPDX-License-Identifier: Apache-2.0
"""Whole models with option replay=icb of the Metal shim, on the stand-in and the emulator.

They write what they write with replay=encode.  Not handled: the option alone (test_metal_replay.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import TINY
from metal.engine import emulated_metal
from metal.shim import BYTES, Work, dispatch
from metal.standin import Standin
from msl_harness import needs_clang

from lily.device.device import Device
from lily.engine import Engine
from lily.errors import DeviceError

pytestmark = needs_clang

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1, "max_tokens": 4}
TOKENS = np.random.default_rng(5).integers(0, 900, 12).tolist()


def written(folder: Path, settings: dict[str, float] | None = None, **options: object) -> list[int]:
    """What random-tiny writes."""
    with emulated_metal(folder, **options) as metal, Engine(TINY, device="metal", max_context=256) as engine:
        metal.set(**(settings or {}))
        assert engine.info["device"]["replay"] == options.get("replay", "encode")
        return engine.generate(TOKENS, **GREEDY).token_ids


@pytest.mark.parametrize("options", [{}, {"slice_ms": 1}], ids=["whole", "cut"])
def test_a_model_writes_the_same_when_its_lists_are_replayed(options: dict[str, int], tmp_path: Path) -> None:
    expected = written(tmp_path)
    assert written(tmp_path, {"order": 2, "seed": 7}, replay="icb", **options) == expected


@pytest.mark.parametrize("barrier", [True, False])
def test_a_barrier_that_is_missing_is_found_in_a_replayed_list(barrier: bool, tmp_path: Path) -> None:
    def copy_twice(metal: Standin) -> list[str]:
        w = Work(Device("metal"))
        recorded = w.record(dispatch(src="a", dst="b"), dispatch(src="b", dst="c", barrier=barrier))
        w.buffers["a"].bytes[:] = 7
        try:
            w.device.wait(w.device.submit([recorded]))
            assert w.buffers["c"].bytes.tolist() == [7] * BYTES
        finally:
            w.close()
        return metal.complaints

    if barrier:
        with emulated_metal(tmp_path, checked=True, replay="icb") as metal:
            copy_twice(metal)
        return
    with (
        pytest.raises(AssertionError, match="race"),
        emulated_metal(tmp_path, checked=True, replay="icb") as metal,
        pytest.raises(DeviceError, match="race"),
    ):
        copy_twice(metal)
