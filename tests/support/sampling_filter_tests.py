# SPDX-License-Identifier: Apache-2.0
"""Tests of sample_filter, which keeps exactly the ids that top-p, min-p and top-k name, up to the last tie.

test_cpu_sample_filter.py and test_shaders_sample_filter.py import them all and say on what they run
(sampling_tests.py). Expected values: float64 and a stable sort in numpy, mlx-lm's definitions of the filters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_calls import Array, RunCall
from sampling_calls import filter_call, kept_after, kept_by, normal_logits

VOCAB = 248_320


def sample_filter(run_call: RunCall, y: Array, vocab: int | None = None, **fields: Any) -> Array:
    """Which ids are kept."""
    return kept_after(run_call(filter_call(y, vocab, **fields))["cut"], y[:vocab])


def clear_logits(scale: float, top_p: float, least: float) -> tuple[Array, Array, float]:
    """Logits, what top-p keeps of them, and by how much: more than ``least`` if there are such."""
    for seed in range(20):
        y = normal_logits(3001, scale, seed)
        want, margin = kept_by(y, top_p)
        if margin > least:
            break
    return y, want, margin


def test_top_p_over_the_whole_vocabulary(run_call: RunCall, slack: float) -> None:
    for scale, top_p in ((0.02, 0.8), (3.0, 0.95), (3.0, 0.999)):
        y = normal_logits(VOCAB, scale, 3)
        want, margin = kept_by(y[:248_077], top_p)
        got = sample_filter(run_call, y, 248_077, top_p=top_p)
        # So many probabilities lie closer together than float32 tells apart: the count may be off where they tie.
        assert margin < 1e-4
        assert abs(int(got.sum()) - int(want.sum())) <= max(slack, want.sum() * 1e-6)
        assert (got != want).sum() <= max(slack, want.sum() * 1e-6)


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.125, 1), (0.25, 2), (0.26, 3), (0.5, 4), (0.875, 7), (0.9, 8), (1.0, 8)]
)
def test_top_p_at_exact_boundaries_keeps_the_lowest_of_equal_ids(run_call: RunCall, top_p: float, count: int) -> None:
    y = np.full(400, -np.inf, np.float32)
    ids = [2, 17, 40, 41, 199, 200, 398, 399]
    y[ids] = 3
    kept = sample_filter(run_call, y, top_p=top_p)
    if top_p < 1:
        np.testing.assert_array_equal(np.flatnonzero(kept), ids[:count])
    else:
        assert kept.all()


def test_top_p_distinguishes_neighbouring_floats(run_call: RunCall) -> None:
    y = np.full(64, -50, np.float32)
    y[10] = 1
    y[20] = np.nextafter(np.float32(1), np.float32(0))
    y[5] = np.nextafter(y[20], np.float32(0))
    for top_p, want in ((0.2, [10]), (0.5, [10, 20]), (0.8, [5, 10, 20])):
        np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_p=top_p)), want)


def test_top_p_that_is_reached_exactly_takes_no_further_id(run_call: RunCall, slack: float) -> None:
    y = np.full(300, -np.inf, np.float32)
    y[200], y[[100, 250]] = 0, -np.log(2)  # probabilities 1/2, 1/4, 1/4
    below = 1 - (slack - 1) * 2.0**-20  # where functions are that inexact, exp(-log 2) may not be exactly 1/2
    np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_p=0.5 * below)), [200])
    np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_p=0.75 * below)), [100, 200])


@pytest.mark.parametrize("top_k", [1, 2, 20, 999, 1000, 1001, 0])
def test_top_k_is_exact(run_call: RunCall, top_k: int) -> None:
    y = np.round(normal_logits(1000, 3), 1)  # full of ties
    np.testing.assert_array_equal(sample_filter(run_call, y, top_k=top_k), kept_by(y, top_k=top_k)[0])


def test_of_many_equal_values_the_lowest_ids_are_kept(run_call: RunCall) -> None:
    y = np.zeros(3000, np.float32)
    for top_k in (1, 31, 32, 33, 64, 65, 1000, 2049, 2999):
        np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_k=top_k)), np.arange(top_k))


def test_top_k_far_below_the_maximum(run_call: RunCall) -> None:
    y = normal_logits(4000, 1)
    y[77] = 500
    for top_k in (1, 2, 3000):
        np.testing.assert_array_equal(sample_filter(run_call, y, top_k=top_k), kept_by(y, top_k=top_k)[0])


@pytest.mark.parametrize("top", [10.3, 8.7, 15.9])
def test_top_k_at_the_edges_of_buckets(run_call: RunCall, top: float) -> None:
    """Ids are counted by their distance from the greatest in steps of 1/128: here they lie on both sides of edges."""
    top = np.float32(top)
    edges = np.array([top - np.float32(b / 128) for b in range(1000, 1300, 7)], np.float32)
    infinity = np.float32(np.inf)
    y = np.concatenate([[top], np.nextafter(edges, infinity), edges, np.nextafter(edges, -infinity)], dtype=np.float32)
    for top_k in range(1, len(y)):
        np.testing.assert_array_equal(sample_filter(run_call, y, top_k=top_k), kept_by(y, top_k=top_k)[0])


@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p_is_relative_to_the_greatest(run_call: RunCall, min_p: float) -> None:
    y = normal_logits(2000, 3)
    np.testing.assert_array_equal(sample_filter(run_call, y, min_p=min_p), kept_by(y, min_p=min_p)[0])


def test_the_tightest_of_equal_thresholds_counts(run_call: RunCall) -> None:
    y = np.zeros(50, np.float32)
    y[[4, 9, 30]] = 5
    np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_k=2, min_p=1)), [4, 9])


def test_filters_together_keep_what_all_keep(run_call: RunCall) -> None:
    y = normal_logits(2000, 3)
    for fields in (
        {"top_p": 0.9, "top_k": 5},
        {"top_p": 0.9, "min_p": 0.2},
        {"top_p": 0.5, "min_p": 0.01, "top_k": 50},
    ):
        want, _ = kept_by(y, **fields)  # type: ignore[arg-type]
        np.testing.assert_array_equal(sample_filter(run_call, y, **fields), want)


def test_negative_and_zero_values_are_ordered_by_value(run_call: RunCall) -> None:
    y = np.array([-1, -0.0, 0.0, -2, -1e-30, 1e-30, -1], np.float32)
    # 1e-30 and -1e-30 differ, 0 and -0 do not.
    for top_k, want in ((1, [5]), (2, [1, 5]), (3, [1, 2, 5]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5])):
        np.testing.assert_array_equal(np.flatnonzero(sample_filter(run_call, y, top_k=top_k)), want)


def test_no_filter_keeps_everything(run_call: RunCall) -> None:
    y = normal_logits(100)
    assert sample_filter(run_call, y).all()
    assert sample_filter(run_call, y, temperature=0, top_k=1).all()


__all__ = [name for name in globals() if name.startswith("test_")]
