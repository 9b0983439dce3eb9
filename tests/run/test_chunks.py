# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut: the same places whatever is cached, fine enough for macOS far from the start."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from lily.checks.cases import REAL
from lily.device.kinds import KINDS
from lily.plan import Builder, prefill_plan
from lily.policy import POLICIES, Policy
from lily.run.chunks import Chunk, cut
from lily.run.points import Marks

START = 7  # the id that opens a message
POLICY = replace(POLICIES["metal"], chunks=((0, 16), (48, 8)), message_gap=3)
FREE = replace(POLICY, canonical=False)
MARKS = Marks(START, (START, 2), (START, 3), (START, 2, 4))


def edges(tokens: list[int], start: int = 0, policy: Policy = POLICY) -> list[int]:
    return [c.end for c in cut(tokens, start, policy, MARKS)]


def test_a_prompt_is_cut_on_a_grid_that_gets_finer():
    assert edges([1] * 75) == [16, 32, 48, 56, 64, 72, 75]
    assert edges([1] * 16) == [16]
    assert edges([1]) == [1]


def test_a_resumed_prompt_has_the_remaining_edges():
    tokens = [1] * 75
    for start in edges(tokens)[:-1]:
        assert edges(tokens, start) == [e for e in edges(tokens) if e > start]


def test_messages_begin_on_edges_that_lie_well_behind_the_one_before():
    tokens = [START, 1, 1, START, 1, START, *[1] * 11, START, *[1] * 20]
    assert edges(tokens) == [3, 16, 32, 38]
    assert edges(tokens, policy=replace(POLICY, message_gap=1)) == [3, 5, 16, 17, 32, 38]
    assert edges(tokens, policy=FREE) == [3, 16, 17, 32, 38]  # where the state is kept, and on the grid


def test_edges_follow_from_what_lies_before_them():
    rng = np.random.default_rng(5)
    for _ in range(50):
        tokens = rng.choice([1, 1, 1, 1, START], size=90).tolist()
        for end in (1, 17, 50, 89):
            assert edges(tokens[:end])[:-1] == [e for e in edges(tokens) if e < end]


def test_the_last_edge_at_or_below_a_place_is_kept():
    user, assistant = [START, 2, *[1] * 8], [START, 3, *[1] * 8]
    tool = [START, 2, 4, *[1] * 7]
    tokens = [START, 5, *[1] * 38, *user, *assistant, *user, *assistant, *tool, *assistant, *tool, START, 3]
    kept = {c.end for c in cut(tokens, 0, POLICY, MARKS) if c.keep}
    # The grid inside of the first message and its end, where the reply to the last real message of the user began, the
    # last message, and the last edge of the grid.
    assert edges(tokens) == [16, 32, 40, 48, 56, 60, 64, 70, 72, 80, 88, 96, 100, 104, 110, 112]
    assert kept == {16, 32, 40, 70, 104, 110}


def test_where_another_sequence_departs_is_kept():
    tokens = [1] * 47
    assert [c.end for c in cut(tokens, 0, POLICY, MARKS, [20]) if c.keep] == [16, 32]
    assert [c.end for c in cut(tokens, 0, FREE, MARKS, [20]) if c.keep] == [20, 32, 46]
    assert [c.end for c in cut(tokens, 0, FREE, MARKS, [2]) if c.keep] == [32, 46]  # read again in no time


def test_where_any_point_is_as_good_the_last_token_but_one_is_kept():
    assert list(cut([1] * 20, 0, FREE, MARKS)) == [Chunk(0, 16, True), Chunk(16, 19, True), Chunk(19, 20, False)]
    assert list(cut([1], 0, FREE, MARKS)) == [Chunk(0, 1, False)]


@pytest.mark.parametrize("device", [name for name, kind in KINDS.items() if kind.gpu])
def test_one_dispatch_of_attention_is_bounded(device):
    """16 query heads of 256 dims: 2 TFLOP, below a second on the slowest GPU that holds the model."""
    policy = POLICIES[device]
    grid = [0, *policy.chunk_edges(262144), 262144]
    assert max((end - start) * end for start, end in pairwise(grid)) * 4 * 16 * 256 < 2.3e12
    assert {end - start for start, end in pairwise(grid)} <= set(policy.buckets)


def test_the_chunk_that_tells_the_speed_has_as_much_to_do_for_a_thread_as_larger_ones():
    """The metal device counts threads, those of a small GEMM tile in proportion to its rows (metal_record.m)."""
    policy = POLICIES["metal"]

    def flops_of_a_thread(rows: int) -> float:
        flops = threads = 0.0
        for d in prefill_plan(Builder(REAL, policy, rows=rows, kv_tokens=8192)).dispatches:
            constants = dict(zip(d.kernel.constants, d.constants, strict=True))
            params = dict(zip((n for n, _ in d.kernel.params), d.params, strict=True))
            threads += prod(d.grid) * prod(d.threads) * constants.get("tile_m", 64) / 64
            if "gemm" in d.kernel.name:
                times = REAL.experts_per_token if d.kernel.name.startswith("moe") else 1
                parts = 2 if d.kernel.name in ("gemm_swiglu", "moe_gemm_gate_up") else 1
                flops += 2 * rows * times * parts * params["n"] * params["k"]
        return flops / threads

    known = flops_of_a_thread(policy.calibration_rows)
    larger = [flops_of_a_thread(rows) for rows in policy.buckets if rows > policy.calibration_rows]
    assert len(larger) == 3
    assert max(larger) < 2 * known
