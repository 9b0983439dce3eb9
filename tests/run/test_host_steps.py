# SPDX-License-Identifier: Apache-2.0
"""What the host does in a device's place: its kernel against the CPU device's bit by bit, plans in segments, failures.

Not handled: that nothing changes for the result (test_ablations.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_harness import fill, open_device, run, same_bits, step

import lily
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.plan import Builder, prefill_plan
from lily.plan.views import Plan
from lily.policy import policy_for
from lily.run import host_steps
from lily.run.host_steps import HOST_KERNELS

Array = Any


# ---- route_group ----------------------------------------------------------------------------------------------------


def both_ways(ids: Array, experts: int, tile: int, *, rows: int, spare: int) -> list[dict[str, Array]]:
    """Outputs of route_group on the device and on the host."""
    m, active = ids.shape
    blocks = max(-(-m * active // tile) + min(experts, m * active) + spare, 1)
    args = {
        "step": step(0, rows), "ids": ids, "offsets": fill(experts + 1, np.int32), "order": fill(m * active, np.int32),
        "blocks": fill((blocks, 2), np.int32),
    }  # fmt: skip
    params = {"experts": experts, "active": active, "tile_m": tile, "max_blocks": blocks}
    device = run(open_device(), "route_group", args, params)
    row = KERNELS["route_group"]
    HOST_KERNELS["route_group"](*(args[a.name].ctypes.data for a in row.args), *(params[n] for n, _ in row.params))
    return [device, {a.name: args[a.name] for a in row.args if a.writes}]


@pytest.mark.parametrize("rows", [1, 2, 9, 64, 512, 4097])
@pytest.mark.parametrize(
    ("experts", "active", "tile"), [(256, 8, 32), (1, 1, 16), (8, 2, 1), (16, 16, 7), (300, 3, 64)]
)
def test_the_host_groups_rows_as_the_device_does(rows: int, experts: int, active: int, tile: int) -> None:
    rng = np.random.default_rng(rows)
    taste = rng.normal(size=experts) * 2  # some experts crowded, some empty
    ids = np.argsort(-(taste + rng.gumbel(size=(rows, experts))), 1)[:, :active].astype(np.int32)
    for spare in (3, 0, -2):
        device, host = both_ways(ids, experts, tile, rows=rows, spare=spare)
        for name in ("offsets", "order", "blocks"):
            assert same_bits(host[name], device[name]), (name, spare)


def test_the_host_reads_only_the_rows_of_the_step() -> None:
    ids = np.full((6, 2), 3, np.int32)
    ids[4:] = 0x7FFFFFFF
    device, host = both_ways(ids, 8, 4, rows=4, spare=3)
    assert all(same_bits(host[name], device[name]) for name in host)


# ---- segments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def config() -> Any:
    with lily.Engine(max_context=64) as engine:
        return engine.config


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_segments_are_the_plan_cut_at_every_routing(config: Any, device: str) -> None:
    policy = policy_for(device, ["resident-routing"])
    plan = prefill_plan(Builder(config, policy, rows=64, kv_tokens=1024))
    parts = list(plan.segments())
    steps = [host for _, host in parts if host is not None]
    assert len(steps) == len(parts) - 1 == config.num_layers
    assert {d.kernel.name for d in steps} == {"route_group"}
    assert parts[-1][1] is None
    assert not any(d.host for part, _ in parts for d in part.dispatches)
    assert all(part.dispatches and not part.dispatches[0].barrier for part, _ in parts)
    # Nothing is lost, and nothing but the barrier at a cut changes.
    rebuilt = [d for part, host in parts for d in (*part.dispatches, *([host] if host else []))]
    assert [replace(d, barrier=False) for d in rebuilt] == [replace(d, barrier=False) for d in plan.dispatches]
    assert {part.scratch_bytes for part, _ in parts} == {plan.scratch_bytes}
    # The host's level is its own: everything before has finished, and nothing has begun after it.
    levels = [d.level for d in plan.dispatches]
    assert all(levels.count(d.level) == 1 for d in steps)
    assert list(accumulate(levels, max)) == levels


def test_a_plan_without_host_steps_is_recorded_whole(config: Any) -> None:
    plan = prefill_plan(Builder(config, policy_for("cpu"), rows=8, kv_tokens=1024))
    assert not any(d.host for d in plan.dispatches)
    ((only, none),) = plan.segments()
    assert (only.dispatches, none) == (plan.dispatches, None)


class Recorder:
    """A device that records ``count`` lists and then no more; it knows which of them still exist."""

    def __init__(self, count: int) -> None:
        self.left, self.alive = count, 0

    def record(self, plan: Plan, buffers: object) -> Recorder:
        if not self.left:
            raise DeviceError("planted")
        self.left, self.alive, self.handle = self.left - 1, self.alive + 1, 1
        return self

    def free(self) -> None:
        self.alive -= 1


def test_a_segment_that_cannot_be_recorded_frees_those_before_it(config: Any) -> None:
    plan = prefill_plan(Builder(config, policy_for("cpu", ["resident-routing"]), rows=8, kv_tokens=64))
    memory = {name: SimpleNamespace(address=0) for name in plan.buffers}
    segments = config.num_layers + 1
    device: Any = Recorder(segments - 1)
    with pytest.raises(DeviceError, match="planted"):
        host_steps.record(device, plan, memory)  # type: ignore[arg-type]
    assert device.alive == 0
    device = Recorder(segments)
    recorded = host_steps.record(device, plan, memory)  # type: ignore[arg-type]
    assert device.alive == segments
    recorded.free()
    assert device.alive == 0


# ---- failures -------------------------------------------------------------------------------------------------------

SHARED = "Once upon a time there was a little"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


class Fault:
    """Fails the host's step number ``at`` from now on, once."""

    def __init__(self) -> None:
        self.at, self.error = -1, DeviceError("planted")
        self.kernel = HOST_KERNELS["route_group"]

    def __call__(self, *args: int) -> None:
        self.at -= 1
        if self.at == -1:
            raise self.error
        self.kernel(*args)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    planted = Fault()
    monkeypatch.setitem(HOST_KERNELS, "route_group", planted)
    return planted


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failure_between_segments_leaves_the_sequence_as_it_was(fault: Fault, at: int) -> None:
    with lily.Engine(max_context=256, ablate=["resident-routing"]) as engine:
        first = engine.generate(SHARED + " girl", **GREEDY).token_ids
        cold = engine.generate(SHARED + " boy", **GREEDY)
        again = engine.generate(SHARED + " girl", **GREEDY)
        assert again.cached_tokens > 0
        fault.at = at
        with pytest.raises(DeviceError, match="planted"):
            engine.generate(SHARED + " boy", **GREEDY)
        after = engine.generate(SHARED + " boy", **GREEDY)
    assert again.token_ids == first
    assert after.token_ids == cold.token_ids
    assert after.cached_tokens == again.cached_tokens


def test_a_failure_that_may_pass_is_tried_again(fault: Fault) -> None:
    with lily.Engine(max_context=256, ablate=["resident-routing"]) as engine:
        expected = engine.generate(SHARED, **GREEDY).token_ids
        engine.generate("Something else", **GREEDY)
        fault.error, fault.at = DeviceError("planted", again=True), 2
        assert engine.generate(SHARED, **GREEDY).token_ids == expected
    assert fault.at < -1
