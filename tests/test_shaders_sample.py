# SPDX-License-Identifier: Apache-2.0
"""Sampling shaders: penalties, the random draw, log-probabilities and the hand-over to the next step.

Expected values: float64 and sorting in numpy; the random generator of sampling_calls.py, which is held to the
published test vectors.  Not handled: the filters (test_shaders_sample_filter.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import fill, same_bits
from msl_harness import ORDERS, SLACK, Array, needs_emulator, needs_shaders, request, run, run_many, step
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
    winner,
)  # fmt: skip

from lily.kernels import MAX_SCORE_TOP, MAX_TOP_LOGPROBS, OUTPUT_RING, STATUS_NONFINITE, STATUS_OK, STATUS_STOP

pytestmark = needs_shaders


# ---- argmax ---------------------------------------------------------------------------------------------------------


def argmax(*given: Any, **options: Any) -> tuple[Array, Array]:
    out = run_many([argmax_call(*given)], **options)[0]
    return out["best"], out["flags"]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 64), (100, 7), (1000, 64), (5000, 4096), (5000, 5000)])
def test_argmax_finds_the_greatest_of_each_slice(count: int, size: int) -> None:
    logits = normal_logits(count)
    best, flags = argmax(logits, count, size)
    for i, (value, _) in enumerate(best):
        part = logits[i * size : (i + 1) * size]
        assert value == part.max()
        assert best[i : i + 1, 1].view(np.int32)[0] == i * size + part.argmax()
    assert not flags.any()


def test_argmax_gives_ties_to_the_lowest_id() -> None:
    logits = np.zeros(999, np.float32)
    assert winner(argmax(logits, 999, 128)[0]) == 0
    logits[::3] = -0.0
    assert winner(argmax(logits, 999, 128)[0]) == 0
    logits[[700, 130, 515]] = 5
    assert winner(argmax(logits, 999, 128)[0]) == 130
    assert winner(argmax(np.full(999, -7, np.float32), 999, 999)[0]) == 0


def test_padding_is_never_chosen_and_never_flagged() -> None:
    logits = normal_logits(1000)
    logits[900:] = np.inf
    logits[950] = np.nan
    best, flags = argmax(logits, 900, 128)
    assert winner(best) == logits[:900].argmax()
    assert not flags.any()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 127, 128, 899])
def test_logits_that_are_not_finite_are_flagged(bad: float, at: int) -> None:
    logits = normal_logits(1000)
    logits[at] = bad
    np.testing.assert_array_equal(argmax(logits, 900, 128)[1], np.arange(8) == at // 128)


# ---- penalties ------------------------------------------------------------------------------------------------------


def sample_logits(*given: Any, order: str = "forward", checked: bool = False, **more: Any) -> dict[str, Array]:
    return run_many([logits_call(*given, **more)], order=order, checked=checked)[0].arrays


def test_plain_logits_pass_through_with_their_statistics() -> None:
    logits = normal_logits(5000, 4)
    out = sample_logits(logits, request(4900), 1024, np.zeros(1))
    assert same_bits(out["y"][:4900], logits[:4900])
    want = float(np.log(np.exp(logits[:4900].astype(float)).sum()))
    assert abs(log_total(out["stats"], 0) - want) < 1e-6 * SLACK
    assert abs(log_total(out["stats"], 2) - want) < 1e-6 * SLACK
    np.testing.assert_array_equal(
        out["stats"][:, 0], [logits[i : min(i + 1024, 4900)].max() for i in range(0, 4900, 1024)]
    )


def test_slices_of_padding_alone_have_empty_statistics() -> None:
    logits = np.full(400, np.nan, np.float32)
    logits[:100] = 1
    out = sample_logits(logits, request(100), 100, np.zeros(1))
    np.testing.assert_array_equal(out["stats"][1:, 0], -np.inf)
    np.testing.assert_array_equal(out["stats"][1:, 1], 0)
    assert not out["flags"].any()


def test_bias_is_added_and_may_ban() -> None:
    logits = normal_logits(500)
    out = sample_logits(logits, request(500), 128, np.zeros(1), bias={3: 2.5, 130: -np.inf, 499: -1})
    want = logits.copy()
    want[3] += np.float32(2.5)
    want[130], want[499] = -np.inf, want[499] - 1
    assert same_bits(out["y"], want)
    # The ban is the caller's wish, not a fault of the model.
    assert not out["flags"].any()


def test_repetition_penalty_counts_each_id_of_the_window_once() -> None:
    logits = normal_logits(500)
    logits[7] = 0
    history = np.array([1, 2, 3, 7, 7, 130, 499, 7, 250, 400, 400])
    req = request(500, repetition_penalty=1.3, repetition_window=6)
    # Nine tokens stand before the new one: the window is history[3:9].
    out = sample_logits(logits, req, 128, history, position=5, rows=4)
    want = logits.copy()
    for i in {7, 130, 499, 250}:
        want[i] = want[i] / np.float32(1.3) if want[i] > 0 else want[i] * np.float32(1.3)
    np.testing.assert_allclose(out["y"], want, rtol=1e-7 * SLACK)
    untouched = [1, 2, 3, 400]
    assert same_bits(out["y"][untouched], logits[untouched])


@pytest.mark.parametrize("window", [0, 1, 3, 1000])
def test_repetition_window_edges(window: int) -> None:
    logits = np.ones(64, np.float32)
    req = request(64, repetition_penalty=2, repetition_window=window)
    out = sample_logits(logits, req, 16, np.array([5, 6, 7, 8, 9]), position=3, rows=1)
    hit = [5, 6, 7, 8][max(0, 4 - window) :]
    np.testing.assert_array_equal(np.flatnonzero(out["y"] == 0.5), hit)


def test_presence_and_frequency_penalties() -> None:
    logits = normal_logits(300)
    counts = np.zeros(300, np.uint32)
    counts[[0, 129, 299]] = [1, 7, 2]
    out = sample_logits(logits, request(300, presence_penalty=0.5, frequency_penalty=0.25), 128, np.zeros(1), counts)
    want = logits - 0.5 * (counts > 0) - 0.25 * counts
    np.testing.assert_allclose(out["y"], want, rtol=1e-6, atol=1e-7)


def test_penalties_come_in_the_order_bias_repetition_counts() -> None:
    logits, counts = np.full(16, -1, np.float32), np.zeros(16, np.uint32)
    counts[4] = 2
    req = request(16, repetition_penalty=2, repetition_window=9, presence_penalty=1, frequency_penalty=0.5)
    out = sample_logits(logits, req, 16, np.array([4]), counts, {4: 3.0})
    assert out["y"][4] == (-1 + 3) / 2 - 1 - 0.5 * 2


# ---- draw -----------------------------------------------------------------------------------------------------------


def draw(*given: Any, order: str = "forward", checked: bool = False, **more: Any) -> Array:
    return run_many([draw_call(*given, **more)], order=order, checked=checked)[0]["best"]


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1, 3])
def test_draw_is_the_gumbel_maximum_of_its_counter(temperature: float) -> None:
    y = normal_logits(5001, 2)
    for seed, position, rows in ((0, 0, 1), (1, 0, 1), (0xDEADBEEF12345678, 70_000, 3), (2**64 - 1, 262_140, 2)):
        score = y.astype(float) / np.float32(temperature) + gumbel(5001, position + rows, seed)
        best = draw(y, temperature=temperature, position=position, rows=rows, seed=seed)
        for i, (value, _) in enumerate(best):
            part = score[1024 * i : 1024 * (i + 1)]
            assert abs(value - part.max()) < 1e-5 * SLACK
        assert winner(best) == score.argmax()


def test_noise_is_accurate_at_both_ends_of_the_uniform() -> None:
    # The greatest and smallest of a hundred thousand draws test the tails, where 1 - u and u are tiny.
    y, far = np.zeros(1 << 17, np.float32), gumbel(1 << 17, 1, 99)
    assert abs(draw(y, seed=99, size=1 << 17)[0, 0] - far.max()) < 2e-6 * SLACK
    least = int(far.argmin())
    y[:] = -1000
    y[least] = 0
    assert abs(draw(y, seed=99, size=1 << 17)[0, 0] - far.min()) < 2e-6 * SLACK


def test_draw_keeps_to_the_cut_and_to_the_vocabulary() -> None:
    y = np.zeros(100, np.float32)
    y[60:] = 9
    seen = {winner(draw(y, position=p, cut=(0, 7), vocab=60)) for p in range(60)}
    assert seen == set(range(8))
    y[30:33] = 1
    seen = {winner(draw(y, position=p, cut=(0, -1), vocab=60)) for p in range(20)}
    assert seen == {30, 31, 32}


def test_temperature_zero_takes_the_best() -> None:
    y = normal_logits(3000)
    y[[100, 2900]] = 50
    assert winner(draw(y, temperature=0)) == 100


def test_a_banned_id_is_never_drawn_and_nothing_is_drawn_from_nothing() -> None:
    y = np.full(64, -np.inf, np.float32)
    best = draw(y, size=64)
    assert best[0, 0] == -np.inf
    assert best[:, 1].copy().view(np.int32)[0] == NO_ID
    y[40] = -1e30
    assert winner(draw(y)) == 40


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "want"), [(5000, 20), (5000, 1), (5000, 0), (20, 20), (7, 7), (7, 20)])
def test_top_logits_in_order_with_ties_to_the_lower_id(count: int, want: int) -> None:
    logits = np.round(normal_logits(count, 1), 1)
    padded = np.concatenate([logits, np.full(100, 99, np.float32)])
    args = {
        "request": request(count, top_logprobs=want), "logits": padded, "top_ids": fill(20, np.int32),
        "top_values": fill(20),
    }  # fmt: skip
    out = run("top_logprobs", args, {"count": len(padded)}, threads=(256,))
    order = np.argsort(-logits, kind="stable")[:want]
    np.testing.assert_array_equal(out["top_ids"][: len(order)], order)
    np.testing.assert_array_equal(out["top_values"][: len(order)], logits[order])


def score(*given: Any, order: str = "forward", checked: bool = False, **more: Any) -> dict[str, Array]:
    return run_many([score_call(*given, **more)], order=order, checked=checked, poison=None)[0].arrays


@pytest.mark.parametrize("top", [5, MAX_SCORE_TOP])
def test_scores_are_log_softmax_of_the_raw_logits(top: int) -> None:
    logits = normal_logits(6 * 3000, 4).reshape(6, 3000)
    logits[:, 2900:] = 100
    target = np.array([0, 5, -1, 2899, 7, 9])
    x = logits[:, :2900].astype(float)
    lp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    out = score(logits, target, top, 2900, 6)
    want = np.where(target >= 0, lp[np.arange(6), np.maximum(target, 0)], 0)
    np.testing.assert_allclose(out["logprobs"], want, atol=2e-6 * SLACK)
    order = np.argsort(-x, -1, kind="stable")[:, :top]
    np.testing.assert_array_equal(out["top_ids"], order)
    np.testing.assert_allclose(out["top_logprobs"], np.take_along_axis(lp, order, -1), atol=2e-6 * SLACK)
    assert not out["flags"].any()


def test_scores_of_a_window_of_rows() -> None:
    logits, target = normal_logits(4 * 100).reshape(4, 100), np.arange(12)
    out = score(logits, target, 2, 100, 7, first=4)
    whole = score(logits, target[4:8], 2, 100, 4)
    for name in ("logprobs", "top_ids", "top_logprobs", "flags"):
        assert same_bits(out[name][4:7], whole[name][:3])
        assert same_bits(np.delete(out[name], slice(4, 7), 0), fill(out[name].shape, out[name].dtype)[3:])


def test_scores_flag_rows_that_are_not_finite() -> None:
    logits = normal_logits(3 * 100).reshape(3, 100)
    logits[1, 63] = np.nan
    logits[2, 99] = np.inf
    np.testing.assert_array_equal(score(logits, np.zeros(3), 1, 99, 3)["flags"], [0, 1, 0])


# ---- hand-over ------------------------------------------------------------------------------------------------------


def advance(*given: Any, order: str = "forward", checked: bool = False, **more: Any) -> dict[str, Array]:
    return run_many([advance_call(*given, **more)], order=order, checked=checked, poison=None)[0].arrays


def test_advance_hands_over_the_best_token() -> None:
    out = advance(step(10, 5, count=70), [(1.0, 90), (3.0, 44), (3.0, 33), (-np.inf, NO_ID)])
    entry = out["outputs"][70 % OUTPUT_RING]
    assert (entry["token"], entry["position"], entry["status"], entry["count"]) == (33, 15, STATUS_OK, 71)
    assert out["next_step"][0].tolist() == (15, 1, 71, 0)
    assert out["next_ids"][0] == 33
    np.testing.assert_array_equal(np.flatnonzero(out["history"] >= 0), [15])
    assert out["history"][15] == 33
    np.testing.assert_array_equal(out["counts"] - np.arange(100), np.arange(100) == 33)
    assert not np.delete(out["outputs"], 70 % OUTPUT_RING).view(np.uint8).any()


def test_advance_notes_a_stop_id_and_keeps_it() -> None:
    req = request(100, stop_count=2, stop_ids=[7, 33] + [12] * 30)
    out = advance(step(3), [(1.0, 33)], request=req)
    assert out["outputs"][0]["status"] == STATUS_STOP
    assert out["next_step"][0]["stopped"] == 1
    # Ids behind stop_count do not count; a step after a stop stays stopped.
    out = advance(step(3, stopped=1), [(1.0, 12)], request=req)
    assert out["outputs"][0]["status"] == STATUS_OK
    assert out["next_step"][0]["stopped"] == 1


@pytest.mark.parametrize(
    ("best", "flags"), [([(1.0, 5), (2.0, 6)], [1, 0]), ([(-np.inf, NO_ID)], [0]), ([(np.nan, 4)], [1])]
)
def test_advance_reports_logits_without_a_token(best: list[tuple[float, int]], flags: list[int]) -> None:
    out = advance(step(3, count=2), best, flags=flags)
    entry = out["outputs"][2]
    assert (entry["token"], entry["status"], entry["count"]) == (-1, STATUS_NONFINITE, 3)
    assert out["next_step"][0].tolist() == (4, 1, 3, 1)
    assert out["next_ids"][0] == 55
    assert (out["history"] == -1).all()
    np.testing.assert_array_equal(out["counts"], np.arange(100))


def test_advance_gives_log_probabilities_of_the_raw_logits() -> None:
    logits = normal_logits(100, 3)
    stats = np.zeros((3, 4), np.float32)
    for i, part in enumerate(np.split(logits, [40, 100])):
        top = part.max() if len(part) else -np.inf
        stats[i, :2] = top, np.exp(part.astype(float) - top).sum()
    order = np.argsort(-logits, kind="stable")[:20]
    req = request(100, top_logprobs=MAX_TOP_LOGPROBS)
    out = advance(
        step(), [(1.0, 8)] * 3, request=req, logits=logits, stats=stats, top_ids=order.astype(np.int32),
        top_values=logits[order],
    )  # fmt: skip
    lp = logits - np.log(np.exp(logits.astype(float)).sum())
    entry = out["outputs"][0]
    assert abs(entry["logprob"] - lp[8]) < 1e-6 * SLACK
    assert entry["top_count"] == 20
    np.testing.assert_array_equal(entry["top_ids"], order)
    np.testing.assert_allclose(entry["top_logprobs"], lp[order], atol=1e-6 * SLACK)


# ---- checked --------------------------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_every_step_runs_clean_when_checked(order: str) -> None:
    options: dict[str, Any] = {"checked": True, "order": order}
    logits, counts = normal_logits(300, 3), np.zeros(300, np.uint32)
    counts[::7] = 2
    argmax(logits, 290, 128, **options)
    req = request(290, repetition_penalty=1.5, repetition_window=5, presence_penalty=1, frequency_penalty=0.1)
    sample_logits(logits, req, 128, np.arange(9) * 30, counts, {3: 1.0, 299: 2.0}, 4, 3, **options)
    draw(logits, size=100, seed=3, cut=(0, 200), vocab=290, **options)
    score(logits[None], np.array([5]), 3, 290, 1, **options)
    stats = np.array([[logits.max(), np.exp(logits - logits.max()).sum(), 0, 0]], np.float32)
    order_of = np.argsort(-logits[:100], kind="stable")[:20]
    advance(
        step(), [(1.0, 8)], request=request(100, top_logprobs=20), logits=logits[:100], stats=stats,
        top_ids=order_of.astype(np.int32), top_values=logits[order_of], **options,
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_order_of_threads(order: str) -> None:
    logits = np.round(normal_logits(900, 1), 1)
    assert winner(argmax(logits, 900, 256, order=order)[0]) == logits.argmax()
    want = logits.astype(float) + gumbel(900, 1, 11)
    assert winner(draw(logits, seed=11, size=256, order=order)) == want.argmax()
    order_of = np.argsort(-logits, kind="stable")[:7]
    np.testing.assert_array_equal(score(logits[None], np.zeros(1), 7, 900, 1, order=order)["top_ids"][0], order_of)
