# SPDX-License-Identifier: Apache-2.0
"""The check of tensor operations when a device opens: what it runs, what it finds, and that it always ends.

Devices: the emulated metal device as an M5 has it, and the cpu device that says it had tensor operations.
Not handled: tensor operations that compute something else (test_pipelines.py); tolerances (test_doctor.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from metal.standin import Standin
from msl_harness import needs_clang

from lily.checks import tensor_check
from lily.checks.cases import cases, numbers
from lily.checks.runs import Rig
from lily.checks.tensor_check import CHECKED, open_checked
from lily.cli import run
from lily.device.device import Device
from lily.kernels import KERNELS
from lily.plan.views import Dispatch
from lily.policy import POLICIES


@pytest.fixture
def m5(emulated: Standin) -> Standin:
    emulated.set(family=10, macos=26.2)
    return emulated


@pytest.fixture
def tensor_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu device in place of one with tensor operations, which ``msl=3.2`` opens without them."""

    def open_device(name: str, *, msl: str = "", **options: Any) -> Device:
        device = Device("cpu", threads=1, **options)
        device.notes["matrix"] = "simdgroup bfloat" if msl else "tensor"
        return device

    monkeypatch.setattr(tensor_check, "open_device", open_device)


def change_results_of(kernel: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of what the device under test computes is another, with one tile of one kernel."""
    original = Rig.run

    def run_changed(bench: Rig, dispatch: Dispatch, inputs: Any) -> Any:
        out = original(bench, dispatch, inputs)
        if dispatch.kernel.name == kernel and numbers(dispatch)["tile_m"] == tile and bench.policy.device != "cpu":
            name = next(a.name for a in dispatch.kernel.args if a.writes)
            out[name][np.flatnonzero(~np.isnan(out[name]))[-1]] += 3
        return out

    monkeypatch.setattr(Rig, "run", run_changed)


def test_every_kernel_with_tensor_operations_is_run_once_with_each_tile() -> None:
    metal = POLICIES["metal"]
    found = [case for case in cases("metal", tensor_check._SIZE) if case.kernel in CHECKED]
    tiles = [(case.kernel, numbers(case.tested)["tile_m"]) for case in found]
    expected = {(k, t) for k in CHECKED if k.startswith("gemm") for _, t in metal.gemm_tiles}
    expected |= {(k, t) for k in CHECKED if k.startswith("moe") for _, t in metal.moe_tiles}
    heads_per_kv = tensor_check._SIZE.config.num_heads // tensor_check._SIZE.config.num_kv_heads
    assert sorted(tiles) == sorted(expected | {("attn_prefill", metal.attention_rows(heads_per_kv))})
    assert {
        "gemm", "gemm_swiglu", "gemm_residual", "moe_gemm_gate_up", "moe_gemm_down", "attn_prefill",
    } == CHECKED  # fmt: skip
    # Only an ablation has the one that is left out.
    assert {name for name, kernel in KERNELS.items() if kernel.matrix} - CHECKED == {"moe_gemm_expanded"}


@needs_clang
@pytest.mark.parametrize(("kernel", "tile"), [("gemm_residual", 64), ("gemm", 16), ("moe_gemm_down", 64)])
def test_a_wrong_result_with_any_tile_is_found(
    kernel: str, tile: int, m5: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_results_of(kernel, tile, monkeypatch)
    with open_checked("metal") as device:
        assert device.info["matrix"] != "tensor"
        told = str(device.info["tensor_check"])
        assert told.startswith(f"failed, simdgroup_matrix is used: {kernel} (tile {tile}): ")


@needs_clang
def test_info_shows_the_device_that_an_engine_would_open(
    m5: Standin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def tuned(device: str, model: str) -> dict[str, str]:
        asked.append((device, model))
        return {"replay": "icb"}

    monkeypatch.setattr("lily.device.tuned.tuned_options", tuned)
    assert run(["info", "--json", "--device", "metal"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert (device["tensor_check"], device["replay"]) == ("passed", "icb")
    assert asked == [("metal", "lily-tiny")]
    assert run(["info", "--json", "--device", "metal", "-m", "/no/such/folder"]) == 1
    assert json.loads(capsys.readouterr().out)["device"]["replay"] == "encode"


def test_a_device_whose_kernel_never_ends_is_left_alone(tensor_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it would wait without end."""
    close, wait = Device.close, Device.wait
    hanging: list[Device] = []

    def wait_until_it_hangs(device: Device, ticket: int, timeout: float | None = None) -> bool:
        done = wait(device, ticket, timeout)
        if device.info.get("matrix") == "tensor":
            hanging.append(device)
            return False
        return done

    def close_unless_it_hangs(device: Device) -> None:
        assert device not in hanging
        close(device)

    monkeypatch.setattr(Device, "wait", wait_until_it_hangs)
    monkeypatch.setattr(Device, "close", close_unless_it_hangs)
    with open_checked("metal") as device:
        assert device.info["matrix"] == "simdgroup bfloat"
        told = str(device.info["tensor_check"])
        assert told == "failed, simdgroup_matrix is used: gemm (tile 512): gemm did not finish within 30 s"
    assert len(hanging) == 1
    close(hanging[0])


def test_a_device_is_closed_when_the_check_itself_breaks(tensor_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Device] = []
    original = Device.close
    monkeypatch.setattr(Device, "close", lambda device: (closed.append(device), original(device)))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_check, "cases", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_checked("metal")
    assert "tensor" in [device.notes.get("matrix") for device in closed]
