# SPDX-License-Identifier: Apache-2.0
"""The whole engine on the metal device: shim, flattened shaders and plan together, on the stand-in and the emulator.

The cpu device is the independent source of what the text should be.  Activations are bfloat16 here and float32 there,
so texts are compared up to the first token whose lead over the next one is small.
Not handled: Apple's compiler and GPUs; single kernels (test_shaders_*.py); the shim alone (test_metal_shim.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import TINY, current_logits, forced_logits, open_engine
from metal.engine import emulated_metal
from metal.standin import standin
from metal.toolchain import Missing
from msl_harness import needs_clang

from lily.device import library_path
from lily.engine import Engine
from lily.errors import DeviceError
from lily.plan.builder import Builder

pytestmark = needs_clang

# Rounding activations to bfloat16 moves lily-tiny's logits by 0.02 on average; a lead of this much does not flip.
CLEAR_LEAD = 0.2
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


@pytest.fixture(autouse=True)
def _tools() -> None:
    try:
        standin()
    except Missing as problem:
        pytest.skip(str(problem))


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
    assert reply.logprobs is not None
    leads = [p.top[0][1] - p.top[1][1] for p in reply.logprobs]
    clear = next((i for i, lead in enumerate(leads) if lead < CLEAR_LEAD), len(leads))
    assert clear >= 5, "too few clear tokens to compare"
    with emulated_metal(tmp_path), metal_engine() as engine:
        assert engine.info["device"]["shaders"] == "source"
        assert greedy_tokens(engine, clear, PROMPT) == reply.token_ids[:clear]


def test_logits_are_close_to_the_cpus_in_prompt_and_reply(tmp_path: Path) -> None:
    tokens = tiny_tokens()
    options: dict[str, Any] = {"ablate": ["handoff"], "max_context": 512}
    with open_engine(TINY, **options) as cpu:
        expected = forced_logits(cpu, tokens, split=20)
    with emulated_metal(tmp_path), metal_engine(TINY, **options) as engine:
        got = forced_logits(engine, tokens, split=20)
    difference = np.abs(got - expected)
    # As for the cpu device's paths that round to bfloat16 (test_engine_golden.py); seen: 0.033 and 0.0085.
    assert difference.max() < 0.06, difference.max(-1)
    assert difference.mean() < 0.012
    assert expected.std() > 0.5, "the logits say nothing"


@pytest.mark.parametrize("settings", [{"order": 1}, {"order": 2, "seed": 11}], ids=["reverse", "random"])
def test_any_order_of_dispatches_between_barriers_gives_the_same_bits(
    settings: dict[str, float], tmp_path: Path
) -> None:
    def run(**chosen: float) -> tuple[list[int], Any]:
        with emulated_metal(tmp_path) as metal, metal_engine(TINY) as engine:
            metal.set(**chosen)
            return greedy_tokens(engine), current_logits(engine)

    (tokens, logits), (again, other) = run(), run(**settings)
    assert again == tokens
    assert np.array_equal(other.view(np.uint32), logits.view(np.uint32))


def test_command_buffers_cut_for_the_watchdog_give_the_same_tokens(tmp_path: Path) -> None:
    with emulated_metal(tmp_path), metal_engine(TINY) as engine:
        tokens, whole = greedy_tokens(engine), engine._device.info["command_buffers"]
    with emulated_metal(tmp_path, slice_ms=1) as metal, metal_engine(TINY) as engine:
        metal.set(order=2)
        assert greedy_tokens(engine) == tokens
        assert int(engine._device.info["command_buffers"]) > 3 * int(whole)


@pytest.mark.parametrize("ablation", ["overlap", "handoff", "gdn-fusion"])
def test_mechanisms_can_be_switched_off(ablation: str, tmp_path: Path) -> None:
    with emulated_metal(tmp_path), metal_engine(TINY) as engine:
        tokens = greedy_tokens(engine)
    with emulated_metal(tmp_path), metal_engine(TINY, ablate=[ablation]) as engine:
        assert greedy_tokens(engine) == tokens


def test_a_step_that_fails_is_an_error_and_the_next_request_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    with emulated_metal(tmp_path) as metal, metal_engine(TINY) as engine:
        tokens = greedy_tokens(engine)
        for ahead in (1, 3):  # in the prompt, in the reply
            metal.set(fail_submission=engine._device.info["command_buffers"] + ahead, fail_code=3, fail_text="fault")
            with pytest.raises(DeviceError, match="lily doctor"):
                greedy_tokens(engine)
            assert greedy_tokens(engine) == tokens


def test_a_cancelled_reply_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    with emulated_metal(tmp_path), metal_engine(TINY) as engine:
        tokens = greedy_tokens(engine)
        stream = engine.stream(tiny_tokens(), max_tokens=50, **GREEDY)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
        assert greedy_tokens(engine) == tokens


def test_prefill_and_decode_are_clean_when_every_access_is_checked(tmp_path: Path) -> None:
    with emulated_metal(tmp_path, checked=True) as metal, metal_engine(TINY) as engine:
        metal.set(order=2)
        greedy_tokens(engine, 2, tiny_tokens(5))


def test_a_barrier_that_is_missing_is_found_when_every_access_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the test before can fail."""
    finish = Builder.finish

    def without_barriers(self: Builder, name: str) -> Any:
        plan = finish(self, name)
        return replace(plan, dispatches=tuple(replace(d, barrier=False) for d in plan.dispatches))

    monkeypatch.setattr(Builder, "finish", without_barriers)
    with (
        pytest.raises(AssertionError, match="race"),
        emulated_metal(tmp_path, checked=True),
        metal_engine(TINY) as engine,
        pytest.raises(DeviceError, match="race"),
    ):
        greedy_tokens(engine, 1, tiny_tokens(5))
