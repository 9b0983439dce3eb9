# SPDX-License-Identifier: Apache-2.0
"""The whole engine against mlx-lm: logits of two random checkpoints, and 768 held-out positions of the embedded model.

Goldens are mlx-lm's float32 results. On the cpu device's float32 paths only the caches differ from them: K and V are
kept in bfloat16. Other paths also round what enters a matrix product, GPUs all that crosses a kernel boundary. The
tolerances below are measured effects of these, not guesses.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_device import Target, isa_paths, on_paths, sweep
from engine_harness import (
    DATA,
    TINY,
    TINY_VL,
    Array,
    forced_logits,
    log_softmax,
    open_engine,
    rounding,
)
from reference import Reference, round_bf16

SPLIT = 64  # of golden `prefill64_then_decode_logits`

# Float32 paths. Against the reference with bf16 caches nothing but the order of float32 sums is left: 5e-5 seen, for
# logits of rms 1. The caches' rounding itself moves the reference by 2.0e-3 at most and 1.8e-4 on average.
ORDER_MAX = 2e-4
CACHE_MAX, CACHE_MEAN = 4e-3, 3e-4

# Paths that round. Rounding the inputs of products moves router logits by up to 0.025 each, so experts whose logits are
# closer than twice that may change places; such a row then differs by a whole expert (0.4 to 0.7 seen, 2 of 33 rows).
# In all other rows `rounding` of engine_harness.py holds.
NEAR_TIE = 0.05
FLIPPED_ROWS = 0.1  # share of all rows, of which a third are near a tie

every_path = on_paths(*isa_paths())
each_checkpoint = pytest.mark.parametrize("model", sweep([TINY, TINY_VL], TINY), ids=lambda path: path.name)


class _Bf16Cache(dict[str, Array]):
    """A layer's cache that keeps K and V as the device does."""

    def __setitem__(self, key: str, value: Array) -> None:
        super().__setitem__(key, round_bf16(value) if key in ("k", "v") else value)


class _DeviceReference(Reference):
    """The reference with the device's caches; it notes how near each row came to a tie between experts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.margins: list[Array] = []

    def new_cache(self) -> list[dict[str, Array]]:
        return [_Bf16Cache(layer) for layer in super().new_cache()]

    def linear(self, module: str, x: Array) -> Array:
        y = super().linear(module, x)
        if module.endswith("mlp.gate"):
            active = self.config["num_experts_per_tok"]
            best = -np.sort(-y, -1)
            self.margins.append(best[:, active - 1] - best[:, active])
        return y


@cache
def _golden(model: Path) -> dict[str, Array]:
    with np.load(model / "golden_mlx_lm_f32.npz") as file:
        return dict(file)


@cache
def _modelled(model: Path) -> tuple[Array, Array]:
    """(logits with the device's caches, smallest margin between a chosen and a left-out expert) of each row."""
    reference = _DeviceReference(model)
    logits = reference.forward(_golden(model)["tokens"], reference.new_cache())
    return logits, np.min(reference.margins, 0)


def _check(got: Array, want: Array, rows: slice, columns: int, model: Path, device: Target) -> None:
    """Holds rows of logits to mlx-lm's `want`; columns: padding ids beyond are not looked at."""
    modelled, margins = (a[rows] for a in _modelled(model))
    if columns < modelled.shape[1]:
        modelled, want = (log_softmax(a[:, :columns]) for a in (modelled, want))
    error = np.abs(got - want)
    if not device.rounds:
        assert np.abs(got - modelled).max() < ORDER_MAX
        assert error.max() < CACHE_MAX
        assert error.mean() < CACHE_MEAN
        assert (got.argmax(1) == want.argmax(1)).all()
        return
    clear = margins >= NEAR_TIE
    assert 0.5 < clear.mean() < 1  # otherwise the lines below say little
    most, mean = rounding()
    assert error[clear].max() < most
    assert error[clear].mean() < mean
    assert (error.max(1) > most).mean() <= FLIPPED_ROWS


@each_checkpoint
@every_path
def test_logits_of_prefill_and_decode_are_mlx_lms(device, model):
    golden = _golden(model)
    tokens = golden["tokens"].tolist()
    with open_engine(model, ablate=["handoff"]) as engine:
        got = forced_logits(engine, tokens, SPLIT)
        _check(got, golden["prefill64_then_decode_logits"][SPLIT - 1 :], slice(SPLIT - 1, None), 1024, model, device)


@each_checkpoint
@every_path
def test_scores_of_every_prompt_position_are_mlx_lms(device, model):
    """`score` with every id asked for is the whole log-softmax of each row of one prefill."""
    golden = _golden(model)
    with open_engine(model) as engine:
        ids = engine.tokenizer.num_tokens
        score = engine.score(golden["tokens"].tolist(), top_k=ids)
    assert (np.sort(score.top_ids, 1) == np.arange(ids)).all()
    assert (np.diff(score.top_logprobs, axis=1) <= 0).all()
    got = np.empty_like(score.top_logprobs)
    np.put_along_axis(got, score.top_ids.astype(np.int64), score.top_logprobs, 1)
    _check(got, golden["prefill_logits"][:-1], slice(0, -1), ids, model, device)
    np.testing.assert_array_equal(score.logprobs, got[np.arange(len(got)), golden["tokens"][1:]])


@every_path
def test_embedded_model_predicts_held_out_text_as_mlx_lm_does(device):
    golden: dict[str, Any] = dict(np.load(DATA / "lily-tiny-golden.npz"))
    agreed = positions = 0
    rows = device.pick(384, 40)
    with open_engine(None) as engine:
        for half in ("val_pg", "val_synth"):
            score = engine.score(golden[f"{half}_tokens"][: rows + 1].tolist(), top_k=1)
            perplexity, wanted = (np.exp(np.mean(x)) for x in (-score.logprobs, golden[f"{half}_nll"][:rows]))
            assert abs(perplexity / wanted - 1) < 0.002 * (384 / rows) ** 0.5  # errors of single tokens average out
            same = score.top_ids[:, 0] == golden[f"{half}_top8"][:rows, 0]
            margin = -np.diff(golden[f"{half}_top8_logits"][:rows, :2], axis=1)[:, 0]
            assert margin[~same].max(initial=0) < 0.2
            agreed, positions = agreed + int(same.sum()), positions + len(same)
    assert positions == 2 * rows
    assert agreed / positions >= 0.985


def test_both_random_checkpoints_give_the_same_bits(device):
    """They hold the same weights; one has vision tensors, two shards with a split module, and A_log as bfloat16."""
    tokens = _golden(TINY)["tokens"].tolist()
    assert tokens == _golden(TINY_VL)["tokens"].tolist()
    scores = []
    for model in (TINY, TINY_VL):
        with open_engine(model) as engine:
            scores.append(engine.score(tokens).logprobs)
    np.testing.assert_array_equal(*scores)
