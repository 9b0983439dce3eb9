# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of its device when it opens: all kernels at once, room for the model, nothing in silence.

Not handled: how the Metal shim compiles (test_metal_shim_kernels.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_harness import TINY
from metal.standin import Standin
from msl_harness import needs_clang

from lily.device import device as device_module
from lily.device import kinds
from lily.device.device import Device
from lily.device.kinds import choose_device, environment_options
from lily.engine import Engine
from lily.errors import DeviceError


def use(engine: Engine, longest: int) -> None:
    """Requests of every kind: all prompt buckets up to ``longest``, each way of sampling, scoring."""
    for length in (1, 9, 33, 65, 129, 257, 513):
        if length <= longest:
            engine.generate([5] * length, max_tokens=3, temperature=0)
            engine.score([5] * length + [6], top_k=2)
    engine.generate([5], max_tokens=3, temperature=1.0, seed=1)
    engine.generate([5], max_tokens=3, temperature=0, logprobs=2)


@pytest.mark.parametrize("ablate", [(), ("gdn-fusion", "attention-fusion", "expert-fusion", "combine-fusion")])
def test_no_request_asks_for_a_kernel_that_was_not_made_at_the_start(
    ablate: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[Any] = set()
    original: Callable[..., int] = Device.kernel

    def kernel(self: Device, kernel: Any, constants: Any, threads: int = 0) -> int:
        asked.add((kernel.name, tuple(constants)))
        return original(self, kernel, constants, threads)

    monkeypatch.setattr(Device, "kernel", kernel)
    with Engine(TINY, device="cpu", max_context=600, ablate=ablate) as engine:
        at_start = set(asked)
        use(engine, 513)
    assert asked == at_start


@needs_clang
def test_metal_compiles_nothing_after_the_start(emulated: Standin) -> None:
    with Engine(TINY, device="metal", max_context=200) as engine:
        made = engine._device.info["pipelines"]
        use(engine, 33)
        assert engine._device.info["pipelines"] == made
        assert engine._device.info["rebuilt"] == 0


# ---- memory
@needs_clang
def test_a_gpu_with_too_little_memory_is_named_with_the_sum_and_the_remedy(emulated: Standin) -> None:
    emulated.set(working_set=4e6)
    with pytest.raises(
        DeviceError, match=r"does not fit: it needs .*\(weights .* 0\.00 GB are available; use a smaller"
    ):
        Engine(TINY, device="metal")
    emulated.set(working_set=8e9, max_buffer=1e5)
    with pytest.raises(DeviceError, match=r"one layer's weights take .*iogpu\.wired_limit_mb"):
        Engine(TINY, device="metal")


@needs_clang
def test_context_follows_from_the_gpus_memory_not_from_the_machines(emulated: Standin) -> None:
    sizes = []
    for room in (200e6, 8e9):
        emulated.set(working_set=room)
        with Engine(device="metal") as engine:
            sizes.append(engine.max_context)
            assert engine.memory.total <= room
    assert sizes[0] < sizes[1]


# ---- tensor operations
M5 = {"family": 10, "macos": 26.2}


@needs_clang
def test_tensor_operations_are_checked_before_they_are_used(emulated: Standin) -> None:
    emulated.set(**M5)
    with Engine(TINY, device="metal", max_context=200) as engine:
        assert engine.info["device"]["matrix"] == "tensor"
        assert engine.info["device"]["tensor_check"] == "passed"


@needs_clang
@pytest.mark.parametrize(
    ("file", "right", "wrong", "kernel"),
    [("tensor.h", "n = uint(place[0])", "n = uint(place[0]) ^ 1", "gemm"),
     ("attention_tensor.h", "first_key + uint(place[0])", "(first_key ^ 16) + uint(place[0])", "attn_prefill")],
)  # fmt: skip
def test_tensor_operations_that_compute_something_else_are_not_used(
    emulated: Standin, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str, kernel: str
) -> None:
    good = device_module.flatten()
    assert good.count(right) == 1
    monkeypatch.setattr(device_module, "flatten", lambda: good.replace(right, wrong))
    emulated.set(**M5)
    with Engine(TINY, device="metal", max_context=200) as engine:
        info = engine.info["device"]
        assert info["matrix"] != "tensor"
        assert info["tensor_check"].startswith(f"failed, simdgroup_matrix is used: {kernel}")
        assert engine.generate([5, 6, 7], max_tokens=2, temperature=0).token_ids


# ---- auto
def test_auto_is_metal_where_the_platform_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.LIBRARIES, "metal", Path("/nowhere/liblily_metal.dylib"))
    assert choose_device("auto") == "metal"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(DeviceError, match=r"missing \(liblily_metal.dylib\): build it .*; .*--device cpu"):
        Engine(TINY)
    with pytest.raises(DeviceError) as error:  # asked for by name: the cpu device is no answer to that
        Engine(TINY, device="metal")
    assert "--device cpu" not in str(error.value)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the metal device")
def test_elsewhere_auto_is_cpu_and_metal_is_refused() -> None:
    assert choose_device("auto") == "cpu"
    with pytest.raises(DeviceError, match="no 'metal' device in this build; available: cpu"):
        Engine(TINY, device="metal")


@needs_clang
@pytest.mark.parametrize(
    ("setting", "words"),
    [({"no_default": 1, "no_devices": 1}, "finds no GPU"), ({"macos": 14.5}, "macOS 15"), ({"family": 5}, "M1"),
     ({"fail_compile": 1}, "does not compile"), ({"fail_pipeline": 3}, "pipeline")],
)  # fmt: skip
def test_auto_stops_with_cause_and_remedy_where_metal_cannot_be_used(
    emulated: Standin, setting: dict[str, float], words: str
) -> None:
    emulated.set(**setting)
    with pytest.raises(DeviceError, match=words) as error:
        Engine(TINY)
    assert "--device cpu" in str(error.value)


@needs_clang
def test_options_of_the_environment(emulated: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_METAL", "cache=off keep_s=0 slice_ms=77")
    with Device("metal") as device:
        assert device.info["slice_ms"] == 77
    monkeypatch.setenv("LILY_METAL", "slice_ms")
    with pytest.raises(DeviceError, match="LILY_METAL holds 'slice_ms'; it takes key=value"):
        Device("metal")
    monkeypatch.setenv("LILY_METAL", 'cache="x')
    with pytest.raises(DeviceError, match=r'LILY_METAL=cache="x cannot be read \(No closing quotation\); it takes'):
        environment_options("metal")
    monkeypatch.setenv("LILY_METAL", "pieces=3")
    with pytest.raises(DeviceError, match="pieces"):
        Device("metal")
