# SPDX-License-Identifier: Apache-2.0
"""What only the stand-in for Metal can show of a whole engine: races of a plan, cuts for the watchdog.  And its text.

The cpu device is the independent source of what the text should be.  Activations are bfloat16 here and float32 there,
so texts are compared up to the first token whose lead over the next one is small.
Not handled: what holds on every device (test_engine_*.py, which run on this one too); faults (test_engine_faults.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import TINY, clear_tokens, open_engine
from metal.engine import emulated_metal
from msl_harness import needs_clang

from lily.device.kinds import library_path
from lily.engine import Engine
from lily.errors import DeviceError
from lily.plan.builder import Builder

pytestmark = needs_clang

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


@pytest.fixture(autouse=True)
def _few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels of the checked build take seconds each to compile: only those that run.
    monkeypatch.setattr("lily.engine.compile_pipelines", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def another_device_in_the_global_namespace() -> None:
    """All device libraries export the same names: each must call its own, whatever was loaded before it."""
    ctypes.CDLL(str(library_path("cpu")), mode=ctypes.RTLD_GLOBAL)


def metal_engine(model: Path | None = None, **options: Any) -> Engine:
    return Engine(model, device="metal", **{"max_context": 512, **options})


def tiny_tokens(count: int = 24) -> list[int]:
    """Token ids for random-tiny."""
    return np.random.default_rng(5).integers(0, 900, count).tolist()


def greedy_tokens(engine: Engine, count: int = 4, prompt: Sequence[int] | str | None = None) -> list[int]:
    return engine.generate(tiny_tokens() if prompt is None else prompt, max_tokens=count, **GREEDY).token_ids


def test_the_embedded_model_writes_what_it_writes_on_the_cpu(tmp_path: Path) -> None:
    with open_engine(None, max_context=512) as cpu:
        reply = cpu.generate(PROMPT, max_tokens=10, logprobs=2, **GREEDY)
    clear = clear_tokens(reply)
    assert len(clear) >= 5, "too few clear tokens to compare"
    with emulated_metal(tmp_path), metal_engine() as engine:
        assert engine.info["device"]["shaders"] == "source"
        assert greedy_tokens(engine, len(clear), PROMPT) == clear


def test_command_buffers_cut_for_the_watchdog_give_the_same_tokens(tmp_path: Path) -> None:
    with emulated_metal(tmp_path), metal_engine(TINY) as engine:
        tokens, whole = greedy_tokens(engine), engine._device.info["command_buffers"]
    with emulated_metal(tmp_path, slice_ms=1) as metal, metal_engine(TINY) as engine:
        metal.set(order=2)
        assert greedy_tokens(engine) == tokens
        assert int(engine._device.info["command_buffers"]) > 3 * int(whole)


def test_prefill_and_decode_are_clean_when_every_access_is_checked(tmp_path: Path) -> None:
    with emulated_metal(tmp_path, checked=True) as metal, metal_engine(TINY) as engine:
        metal.set(order=2)
        greedy_tokens(engine, 2, tiny_tokens(5))


def test_a_barrier_that_is_missing_is_found_when_every_access_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the test before can fail: one barrier in the middle of each plan is left out."""
    finish = Builder.finish

    def without_one(self: Builder, name: str) -> Any:
        plan = finish(self, name)
        barriers = [i for i, d in enumerate(plan.dispatches) if d.barrier]
        dispatches = list(plan.dispatches)
        for i in barriers[len(barriers) // 2 :][:1]:
            dispatches[i] = replace(dispatches[i], barrier=False)
        return replace(plan, dispatches=tuple(dispatches))

    monkeypatch.setattr(Builder, "finish", without_one)
    with (
        pytest.raises(AssertionError, match="race"),
        emulated_metal(tmp_path, checked=True),
        metal_engine(TINY) as engine,
        pytest.raises(DeviceError, match="race"),
    ):
        greedy_tokens(engine, 1, tiny_tokens(5))
