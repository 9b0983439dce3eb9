# SPDX-License-Identifier: Apache-2.0
"""Tests of the sampling kernels: penalties, the random draw, log-probabilities and the hand-over to the next step.

test_cpu_sample.py and test_shaders_sample.py import them all and say on what they run with two fixtures:
``run_call`` runs a Call and returns what it wrote, ``slack`` is a factor for tight tolerances.
Expected values: float64 and sorting in numpy; mlx-lm's definitions of the penalties; the random numbers of
sampling_calls.py, which test_cpu_sample.py holds to published ones.
Not handled: the filters (sampling_filter_tests.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_calls import Array, RunCall
from kernel_harness import fill, request, same_bits, step
from sampling_calls import (
    NO_ID,
    advance_call,
    argmax_call,
    draw_call,
    gumbel,
    log_total,
    logits_call,
    normal_logits,
    score_call,
    top_call,
    winner,
)

from lily.kernels import MAX_SCORE_TOP, MAX_TOP_LOGPROBS, OUTPUT_RING, STATUS_NONFINITE, STATUS_OK, STATUS_STOP

# ---- argmax ---------------------------------------------------------------------------------------------------------


def argmax(run_call: RunCall, *given: Any) -> tuple[Array, Array]:
    out = run_call(argmax_call(*given))
    return out["best"], out["flags"]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 64), (100, 7), (1000, 64), (5000, 4096), (5000, 5000)])
def test_argmax_finds_the_greatest_of_each_slice(run_call: RunCall, count: int, size: int) -> None:
    logits = normal_logits(count)
    best, flags = argmax(run_call, logits, count, size)
    for i, (value, _) in enumerate(best):
        part = logits[i * size : (i + 1) * size]
        assert value == part.max()
        assert best[i : i + 1, 1].view(np.int32)[0] == i * size + part.argmax()
    assert not flags.any()


def test_argmax_gives_ties_to_the_lowest_id(run_call: RunCall) -> None:
    logits = np.zeros(999, np.float32)
    assert winner(argmax(run_call, logits, 999, 128)[0]) == 0
    logits[::3] = -0.0
    assert winner(argmax(run_call, logits, 999, 128)[0]) == 0
    logits[[700, 130, 515]] = 5
    assert winner(argmax(run_call, logits, 999, 128)[0]) == 130
    assert winner(argmax(run_call, np.full(999, -7, np.float32), 999, 999)[0]) == 0


def test_padding_is_never_chosen_and_never_flagged(run_call: RunCall) -> None:
    logits = normal_logits(1000)
    logits[900:] = np.inf
    logits[950] = np.nan
    best, flags = argmax(run_call, logits, 900, 128)
    assert winner(best) == logits[:900].argmax()
    assert not flags.any()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 127, 128, 899])
def test_logits_that_are_not_finite_are_flagged(run_call: RunCall, bad: float, at: int) -> None:
    logits = normal_logits(1000)
    logits[at] = bad
    np.testing.assert_array_equal(argmax(run_call, logits, 900, 128)[1], np.arange(8) == at // 128)


# ---- penalties ------------------------------------------------------------------------------------------------------


def test_plain_logits_pass_through_with_their_statistics(run_call: RunCall, slack: float) -> None:
    logits = normal_logits(5000, 4)
    out = run_call(logits_call(logits, request(4900), 1024, np.zeros(1)))
    assert same_bits(out["y"][:4900], logits[:4900])
    want = float(np.log(np.exp(logits[:4900].astype(float)).sum()))
    assert abs(log_total(out["stats"], 0) - want) < 1e-6 * slack
    assert abs(log_total(out["stats"], 2) - want) < 1e-6 * slack
    np.testing.assert_array_equal(
        out["stats"][:, 0], [logits[i : min(i + 1024, 4900)].max() for i in range(0, 4900, 1024)]
    )


def test_slices_of_padding_alone_have_empty_statistics(run_call: RunCall) -> None:
    logits = np.full(400, np.nan, np.float32)
    logits[:100] = 1
    out = run_call(logits_call(logits, request(100), 100, np.zeros(1)))
    np.testing.assert_array_equal(out["stats"][1:, 0], -np.inf)
    np.testing.assert_array_equal(out["stats"][1:, 1], 0)
    assert not out["flags"].any()


def test_bias_is_added_and_may_ban(run_call: RunCall) -> None:
    logits = normal_logits(500)
    out = run_call(logits_call(logits, request(500), 128, np.zeros(1), bias={3: 2.5, 130: -np.inf, 499: -1}))
    want = logits.copy()
    want[3] += np.float32(2.5)
    want[130], want[499] = -np.inf, want[499] - 1
    assert same_bits(out["y"], want)
    # The ban is the caller's wish, not a fault of the model.
    assert not out["flags"].any()


@pytest.mark.parametrize("size", [32, 100, 128])
def test_ids_that_are_masked_out_are_minus_infinity_whatever_is_added(run_call: RunCall, size: int) -> None:
    logits, allowed = normal_logits(500), [0, 31, 32, 130, 498]
    counts = np.zeros(500, np.uint32)
    counts[[32, 33]] = 1
    req = request(499, presence_penalty=1)
    out = run_call(logits_call(logits, req, size, np.zeros(1), counts, bias={31: 2, 40: 9000, 499: 1}, allowed=allowed))
    want = np.full(499, -np.inf, np.float32)
    want[allowed] = logits[allowed]
    want[31], want[32] = logits[31] + np.float32(2), logits[32] - np.float32(1)
    assert same_bits(out["y"][:499], want)
    raw = float(np.log(np.exp(logits[:499].astype(float)).sum()))
    assert abs(log_total(out["stats"], 0) - raw) < 1e-5  # log-probabilities stay those of the raw logits
    assert not out["flags"].any()


def test_slices_that_are_masked_out_have_empty_statistics(run_call: RunCall, slack: float) -> None:
    out = run_call(logits_call(normal_logits(500), request(500), 100, np.zeros(1), allowed=[250]))
    empty = [0, 1, 3, 4]
    np.testing.assert_array_equal(out["stats"][empty, 2], -np.inf)
    np.testing.assert_array_equal(out["stats"][empty, 3], 0)
    assert out["stats"][2, 2] == out["y"][250]
    assert abs(out["stats"][2, 3] - 1) < 1e-6 * slack


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_what_is_masked_out_is_never_drawn_and_where_all_is_nothing_is(run_call: RunCall, temperature: float) -> None:
    logits = np.full(300, 50, np.float32)
    for allowed, expected in (([299], 299), ([64], 64), ([], NO_ID)):
        y = run_call(logits_call(logits, request(300), 64, np.zeros(1), allowed=allowed))["y"]
        for seed in range(4):
            best = run_call(draw_call(y, temperature=temperature, seed=seed, size=64))["best"]
            assert winner(best) == expected


def test_nothing_that_may_be_drawn_is_reported_and_not_taken_for_token_0(run_call: RunCall) -> None:
    out = run_call(advance_call(step(4), [(-np.inf, NO_ID), (-np.inf, NO_ID)]))
    entry = out["outputs"][0]
    assert (entry["status"], entry["token"]) == (STATUS_NONFINITE, -1)
    assert out["next_ids"][0] == 55
    assert (out["history"] == -1).all()


def test_repetition_penalty_counts_each_id_of_the_window_once(run_call: RunCall, slack: float) -> None:
    logits = normal_logits(500)
    logits[7] = 0
    history = np.array([1, 2, 3, 7, 130, 130, 499, 130, 250, 400, 400])
    req = request(500, repetition_penalty=1.3, repetition_window=6)
    # Nine tokens stand before the new one: the window is history[3:9].
    out = run_call(logits_call(logits, req, 128, history, position=5, rows=4))
    want = logits.copy()
    for i in {7, 130, 499, 250}:
        want[i] = want[i] / np.float32(1.3) if want[i] > 0 else want[i] * np.float32(1.3)
    np.testing.assert_allclose(out["y"], want, rtol=1e-7 * slack)
    untouched = [1, 2, 3, 400]
    assert same_bits(out["y"][untouched], logits[untouched])


@pytest.mark.parametrize("window", [0, 1, 3, 1000])
def test_repetition_window_edges(run_call: RunCall, window: int) -> None:
    logits = np.ones(64, np.float32)
    req = request(64, repetition_penalty=2, repetition_window=window)
    out = run_call(logits_call(logits, req, 16, np.array([5, 6, 7, 8, 9]), position=3, rows=1))
    hit = [5, 6, 7, 8][max(0, 4 - window) :]
    np.testing.assert_array_equal(np.flatnonzero(out["y"] == 0.5), hit)


def test_presence_and_frequency_penalties(run_call: RunCall) -> None:
    logits = normal_logits(300)
    counts = np.zeros(300, np.uint32)
    counts[[0, 129, 299]] = [1, 7, 2]
    out = run_call(
        logits_call(logits, request(300, presence_penalty=0.5, frequency_penalty=0.25), 128, np.zeros(1), counts)
    )
    want = logits - 0.5 * (counts > 0) - 0.25 * counts
    np.testing.assert_allclose(out["y"], want, rtol=1e-6, atol=1e-7)


def test_penalties_come_in_the_order_bias_repetition_counts(run_call: RunCall) -> None:
    logits, counts = np.full(16, -1, np.float32), np.zeros(16, np.uint32)
    counts[4] = 2
    req = request(16, repetition_penalty=2, repetition_window=9, presence_penalty=1, frequency_penalty=0.5)
    out = run_call(logits_call(logits, req, 16, np.array([4]), counts, {4: 3.0}))
    assert out["y"][4] == (-1 + 3) / 2 - 1 - 0.5 * 2


# ---- draw -----------------------------------------------------------------------------------------------------------


def draw(run_call: RunCall, *given: Any, **more: Any) -> Array:
    return run_call(draw_call(*given, **more))["best"]


def check_noise(run_call: RunCall, slack: float, count: int) -> None:
    """The greatest and smallest of many draws test the tails of the uniform, where 1 - u and u are tiny."""
    y, far = np.zeros(count, np.float32), gumbel(count, 1, 99)
    assert abs(draw(run_call, y, seed=99, size=count)[0, 0] - far.max()) < 2e-6 * slack
    least = int(far.argmin())
    y[:] = -1000
    y[least] = 0
    assert abs(draw(run_call, y, seed=99, size=count)[0, 0] - far.min()) < 2e-6 * slack


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1, 3])
def test_draw_is_the_gumbel_maximum_of_its_counter(run_call: RunCall, temperature: float, slack: float) -> None:
    y = normal_logits(5001, 2)
    for seed, position, rows in ((0, 0, 1), (1, 0, 1), (0xDEADBEEF12345678, 70_000, 3), (2**64 - 1, 262_140, 2)):
        score = y.astype(float) / np.float32(temperature) + gumbel(5001, position + rows, seed)
        # Slices that begin within a vector, too.
        for size in (1024, 1001):
            best = draw(run_call, y, temperature=temperature, position=position, rows=rows, seed=seed, size=size)
            for i, (value, _) in enumerate(best):
                assert abs(value - score[size * i : size * (i + 1)].max()) < 1e-5 * slack
            assert winner(best) == score.argmax()


def test_draw_keeps_to_the_cut_and_to_the_vocabulary(run_call: RunCall) -> None:
    y = np.zeros(100, np.float32)
    y[60:] = 9
    seen = {winner(draw(run_call, y, position=p, cut=(0, 7), vocab=60)) for p in range(200)}
    assert seen == set(range(8))
    y[30:33] = 1
    seen = {winner(draw(run_call, y, position=p, cut=(0, -1), vocab=60)) for p in range(50)}
    assert seen == {30, 31, 32}


def test_a_group_keeps_to_its_slice(run_call: RunCall) -> None:
    for size in (17, 31, 33):
        y = np.zeros(3 * size, np.float32)
        y[[size - 1, 2 * size]] = 99
        for temperature in (0, 1):
            ids = draw(run_call, y, temperature=temperature, size=size)[:, 1].copy().view(np.int32)
            assert ids[0] == size - 1
            assert size <= ids[1] < 2 * size
            assert ids[2] == 2 * size


def test_temperature_zero_takes_the_best(run_call: RunCall) -> None:
    y = normal_logits(3000)
    y[[100, 2900]] = 50
    assert winner(draw(run_call, y, temperature=0)) == 100


def test_a_banned_id_is_never_drawn_and_nothing_is_drawn_from_nothing(run_call: RunCall) -> None:
    y = np.full(64, -np.inf, np.float32)
    best = draw(run_call, y, size=64)
    assert best[0, 0] == -np.inf
    assert best[:, 1].copy().view(np.int32)[0] == NO_ID
    y[40] = -1e30
    assert winner(draw(run_call, y)) == 40


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "want"), [(5000, 20), (5000, 1), (5000, 0), (20, 20), (7, 7), (7, 20)])
def test_top_logits_in_order_with_ties_to_the_lower_id(run_call: RunCall, count: int, want: int) -> None:
    logits = np.round(normal_logits(count, 1), 1)
    padded = np.concatenate([logits, np.full(100, 99, np.float32)])
    out = run_call(top_call(padded, count, want))
    order = np.argsort(-logits, kind="stable")[:want]
    np.testing.assert_array_equal(out["top_ids"][: len(order)], order)
    np.testing.assert_array_equal(out["top_values"][: len(order)], logits[order])


@pytest.mark.parametrize("top", [5, MAX_SCORE_TOP])
def test_scores_are_log_softmax_of_the_raw_logits(run_call: RunCall, slack: float, top: int) -> None:
    logits = normal_logits(6 * 3000, 4).reshape(6, 3000)
    logits[:, 2900:] = 100
    target = np.array([0, 5, -1, 2899, 7, 9])
    x = logits[:, :2900].astype(float)
    lp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    out = run_call(score_call(logits, target, top, 2900, 6))
    want = np.where(target >= 0, lp[np.arange(6), np.maximum(target, 0)], 0)
    np.testing.assert_allclose(out["logprobs"], want, atol=2e-6 * slack)
    order = np.argsort(-x, -1, kind="stable")[:, :top]
    np.testing.assert_array_equal(out["top_ids"], order)
    np.testing.assert_allclose(out["top_logprobs"], np.take_along_axis(lp, order, -1), atol=2e-6 * slack)
    assert not out["flags"].any()


def test_scores_of_a_window_of_rows(run_call: RunCall) -> None:
    logits, target = normal_logits(4 * 100).reshape(4, 100), np.arange(12)
    out = run_call(score_call(logits, target, 2, 100, 7, first=4))
    whole = run_call(score_call(logits, target[4:8], 2, 100, 4))
    for name in ("logprobs", "top_ids", "top_logprobs", "flags"):
        assert same_bits(out[name][4:7], whole[name][:3])
        assert same_bits(np.delete(out[name], slice(4, 7), 0), fill(out[name].shape, out[name].dtype)[3:])


def test_scores_flag_rows_that_are_not_finite(run_call: RunCall) -> None:
    logits = normal_logits(3 * 100).reshape(3, 100)
    logits[1, 63] = np.nan
    logits[2, 99] = np.inf
    np.testing.assert_array_equal(run_call(score_call(logits, np.zeros(3), 1, 99, 3))["flags"], [0, 1, 0])


# ---- hand-over ------------------------------------------------------------------------------------------------------


def test_advance_hands_over_the_best_token(run_call: RunCall) -> None:
    out = run_call(advance_call(step(10, 5, count=70), [(1.0, 90), (3.0, 44), (3.0, 33), (-np.inf, NO_ID)]))
    entry = out["outputs"][70 % OUTPUT_RING]
    assert (entry["token"], entry["position"], entry["status"], entry["count"]) == (33, 15, STATUS_OK, 71)
    assert out["next_step"][0].tolist() == (15, 1, 71, 0)
    assert out["next_ids"][0] == 33
    np.testing.assert_array_equal(np.flatnonzero(out["history"] >= 0), [15])
    assert out["history"][15] == 33
    np.testing.assert_array_equal(out["counts"] - np.arange(100), np.arange(100) == 33)
    assert not np.delete(out["outputs"], 70 % OUTPUT_RING).view(np.uint8).any()


def test_advance_notes_a_stop_id_and_keeps_it(run_call: RunCall) -> None:
    req = request(100, stop_count=2, stop_ids=[7, 33] + [12] * 30)
    out = run_call(advance_call(step(3), [(1.0, 33)], request=req))
    assert out["outputs"][0]["status"] == STATUS_STOP
    assert out["next_step"][0]["stopped"] == 1
    # Ids behind stop_count do not count; a step after a stop stays stopped.
    out = run_call(advance_call(step(3, stopped=1), [(1.0, 12)], request=req))
    assert out["outputs"][0]["status"] == STATUS_OK
    assert out["next_step"][0]["stopped"] == 1


@pytest.mark.parametrize(
    ("best", "flags"), [([(1.0, 5), (2.0, 6)], [1, 0]), ([(-np.inf, NO_ID)], [0]), ([(np.nan, 4)], [1])]
)
def test_advance_reports_logits_without_a_token(
    run_call: RunCall, best: list[tuple[float, int]], flags: list[int]
) -> None:
    out = run_call(advance_call(step(3, count=2), best, flags=flags))
    entry = out["outputs"][2]
    assert (entry["token"], entry["status"], entry["count"]) == (-1, STATUS_NONFINITE, 3)
    assert out["next_step"][0].tolist() == (4, 1, 3, 1)
    assert out["next_ids"][0] == 55
    assert (out["history"] == -1).all()
    np.testing.assert_array_equal(out["counts"], np.arange(100))


def test_advance_gives_log_probabilities_of_the_raw_logits(run_call: RunCall, slack: float) -> None:
    logits = normal_logits(100, 3)
    stats = np.zeros((3, 4), np.float32)
    for i, part in enumerate(np.split(logits, [40, 100])):
        best = part.max() if len(part) else -np.inf
        stats[i, :2] = best, np.exp(part.astype(float) - best).sum()
    order = np.argsort(-logits, kind="stable")[:20]
    req = request(100, top_logprobs=MAX_TOP_LOGPROBS)
    top = {"top_ids": order.astype(np.int32), "top_values": logits[order]}
    out = run_call(advance_call(step(), [(1.0, 8)] * 3, request=req, logits=logits, stats=stats, **top))
    lp = logits - np.log(np.exp(logits.astype(float)).sum())
    entry = out["outputs"][0]
    assert abs(entry["logprob"] - lp[8]) < 1e-6 * slack
    assert entry["top_count"] == 20
    np.testing.assert_array_equal(entry["top_ids"], order)
    np.testing.assert_allclose(entry["top_logprobs"], lp[order], atol=1e-6 * slack)


__all__ = [name for name in globals() if name.startswith("test_")]
