# SPDX-License-Identifier: Apache-2.0
"""Parts of a prefill plan as pure data: what one leaves to the next, and how much work it is.

Not handled: running them (tests/run/test_parts.py).
"""

from __future__ import annotations

import pytest
from models import model_config

from lily.checkpoint.config import ModelConfig
from lily.plan import Builder, Plan, prefill_plan
from lily.plan.memory import COMMON, common_buffers
from lily.policy import POLICIES, Policy

SHORT = 512  # rows
CONFIG = ModelConfig.from_dict(model_config(num_hidden_layers=40), "config")


def plan_for(policy: Policy, rows: int, top: int | None) -> Plan:
    return prefill_plan(Builder(CONFIG, policy, rows=rows, kv_tokens=4096), score_top=top)


@pytest.mark.parametrize("top", [None, 2], ids=["prefill", "score"])
@pytest.mark.parametrize("rows", [1024, 2048])
def test_parts_leave_nothing_to_each_other_but_the_residual_stream(rows: int, top: int | None) -> None:
    """And what is the sequence's own. Anybody may use scratch memory, logits and the rest in between."""
    plan = plan_for(POLICIES["metal"], rows, top)
    parts = plan.parts(POLICIES["metal"].parts(rows))
    assert [(d.label, d.views) for part in parts for d in part.dispatches] == [
        (d.label, d.views) for d in plan.dispatches
    ]
    for part in parts:
        written: set[tuple[int, int]] = set()
        for dispatch in part.dispatches:
            for argument, view in zip(dispatch.kernel.args, dispatch.views, strict=True):
                if view.buffer == "scratch" and argument.reads and not argument.writes:
                    assert any(a <= view.offset and view.offset + view.nbytes <= b for a, b in written), dispatch.label
            for argument, view in zip(dispatch.kernel.args, dispatch.views, strict=True):
                if view.buffer == "scratch" and argument.writes:
                    written.add((view.offset, view.offset + view.nbytes))
    shared = {name for name in COMMON if name != "residual"}
    early = {view.buffer for part in parts[:-1] for dispatch in part.dispatches for view in dispatch.views}
    assert not {name for name in early if name in shared or name.startswith("score.")}


@pytest.mark.parametrize(("rows", "count"), [(32, 1), (512, 1), (1024, 2), (2048, 4)])
def test_a_part_is_as_much_work_as_so_many_rows_through_all_layers(rows: int, count: int) -> None:
    policy, layers = POLICIES["metal"], CONFIG.num_layers
    assert policy.parts(rows) == count
    parts = plan_for(policy, rows, None).parts(count)
    assert len(parts) == count
    for part in parts:
        own = {dispatch.label.split(".")[1] for dispatch in part.dispatches if dispatch.label.startswith("layers.")}
        assert len(own) * rows <= SHORT * layers


@pytest.mark.parametrize("name", POLICIES)
def test_short_prompts_go_in_one_part(name: str) -> None:
    policy = POLICIES[name]
    assert policy.part_rows == SHORT
    assert policy.bucket(SHORT) == SHORT


def test_the_residual_stream_has_memory_of_its_own_where_chunks_go_in_parts() -> None:
    assert common_buffers(CONFIG, POLICIES["metal"])["residual"] == 2048 * CONFIG.hidden_size * 2
    assert common_buffers(CONFIG, POLICIES["cpu"])["residual"] == 0
    for rows in (8, 512, 1024, 2048):
        used = plan_for(POLICIES["metal"], rows, None).buffers.get("residual", 0)
        assert used == (rows * CONFIG.hidden_size * 2 if rows > SHORT else 0)
