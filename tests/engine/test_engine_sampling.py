# SPDX-License-Identifier: Apache-2.0
"""Sampling of the whole engine against a few lines of numpy, on the logits of each step; padding rows; damaged weights.

Not handled: the kernels alone (test_cpu_sample.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_device import Target, sweep
from engine_harness import TINY, Array, current_logits, forced_logits, log_softmax, open_engine, rounding
from models import edit_floats, tiny_draft, tiny_model, with_generation_config
from sampling_calls import gumbel

from lily.engine import Engine
from lily.errors import DeviceError, InvalidRequestError
from lily.kernels import OUTPUT_RING
from lily.run import reply as reply_module
from lily.sampling import SamplingParams

IDS = [7, 300, 41, 5, 900, 41]  # a prompt for random-tiny


@pytest.fixture(scope="module")
def tiny(device: Target) -> Iterator[Engine]:
    """A small model with random weights: every logit counts."""
    with open_engine(tiny_model(), max_context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def stepper(device: Target) -> Iterator[Engine]:
    """The same model one step deep, for logits of every position."""
    with open_engine(tiny_model(), ablate=["handoff"]) as engine:
        yield engine


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.7, "top_k": 0, "top_p": 1.0},
        {"temperature": 0.6, "repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 5},
        {"temperature": 0, "logit_bias": {3: 40.0}},
    ],
    ids=["greedy", "hot", "penalties", "bias"],
)  # fmt: skip
def test_logprobs_are_log_softmax_of_the_raw_logits(tiny, stepper, device, sampling):
    """Whatever the sampler does to the logits; padding ids have no part in the sum."""
    n = tiny.tokenizer.num_tokens
    count = device.pick(100, OUTPUT_RING + 2 if sampling == {"temperature": 0} else 6)  # once beyond the ring
    reply = tiny.generate(IDS, max_tokens=count, seed=4, logprobs=7, ignore_eos=True, **sampling)
    assert len(reply.token_ids) == count
    raw = forced_logits(stepper, IDS + reply.token_ids, len(IDS))[:-1, :n]
    want = log_softmax(raw)
    assert reply.logprobs is not None
    assert [p.token_id for p in reply.logprobs] == reply.token_ids
    got = np.array([p.logprob for p in reply.logprobs])
    np.testing.assert_allclose(got, want[np.arange(len(got)), reply.token_ids], rtol=0, atol=2e-5)
    order = np.argsort(-raw, 1, kind="stable")[:, :7]
    np.testing.assert_array_equal([[i for i, _ in p.top] for p in reply.logprobs], order)
    top = [[value for _, value in p.top] for p in reply.logprobs]
    np.testing.assert_allclose(top, np.take_along_axis(want, order, 1), rtol=0, atol=2e-5)


def test_logprobs_of_all_ids_sum_to_one(tiny):
    score = tiny.score(IDS, top_k=tiny.tokenizer.num_tokens)
    np.testing.assert_allclose(np.exp(score.top_logprobs.astype(np.float64)).sum(1), 1, atol=1e-5)


def test_asking_for_logprobs_does_not_change_the_reply(tiny, device):
    for sampling in ({"temperature": 0}, {"seed": 9}):
        how = {"max_tokens": device.pick(20, 5), **sampling}
        replies = [tiny.generate(IDS, logprobs=n, **how).token_ids for n in (None, 0, 20)]
        assert replies[0] == replies[1] == replies[2]
    assert [p.top for p in tiny.generate(IDS, max_tokens=2, logprobs=0, seed=1).logprobs or []] == [(), ()]


def test_score_agrees_with_generation(tiny, device):
    """Teacher-forced; other rows and kernels make other roundings where a device does not promise the same bits."""
    count = device.pick(40, 10)
    reply = tiny.generate(IDS, max_tokens=count, seed=4, logprobs=3, ignore_eos=True)
    score = tiny.score(IDS + reply.token_ids, top_k=3)
    assert score.logprobs.dtype == score.top_logprobs.dtype == np.float32
    assert score.top_ids.dtype == np.int32
    assert score.top_ids.shape == score.top_logprobs.shape == (len(IDS) + count - 1, 3)
    assert reply.logprobs is not None
    most = 1e-6 if device.exact else rounding()[0]
    np.testing.assert_allclose(score.logprobs[len(IDS) - 1 :], [p.logprob for p in reply.logprobs], atol=most)
    if device.exact:
        assert score.top_ids[len(IDS) - 1 :].tolist() == [[i for i, _ in p.top] for p in reply.logprobs]
    assert tiny.score(IDS).top_ids.shape == (len(IDS) - 1, 0)


# ---- sampling rules, against a few lines of numpy -------------------------------------------------------------------


def _adjusted(logits: Array, prompt: list[int], reply: list[int], **s: Any) -> Array:
    """Logits after bias and penalties, as mlx-lm defines them."""
    y = logits.astype(np.float64).copy()
    for id, value in s.get("logit_bias", {}).items():
        y[id] += value
    window = s.get("repetition_window", 20)
    if s.get("repetition_penalty", 1) != 1 and window:
        for id in set((prompt + reply)[-window:]):
            y[id] = y[id] / s["repetition_penalty"] if y[id] > 0 else y[id] * s["repetition_penalty"]
    for id, count in Counter(reply).items():
        y[id] -= s.get("presence_penalty", 0) + s.get("frequency_penalty", 0) * count
    return y


def _kept(y: Array, top_p: float = 1, min_p: float = 0, top_k: int = 0) -> set[int]:
    """Ids that the filters leave: top-p, then min-p, then top-k, on probabilities at temperature 1."""
    p = np.exp(log_softmax(y))
    order = np.argsort(-y, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = [int(i) for i, mass in zip(order, before, strict=True) if mass < top_p]
    kept = [i for i in kept if p[i] >= min_p * p.max()]
    return set(kept[:top_k] if top_k else kept)


FAVOURITES = {11: 4.0, 12: 3.9, 13: 3.8, 500: 3.8}  # biases that let a few tokens win again and again


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.5, "repetition_window": 3},
    {"repetition_penalty": 0.8, "repetition_window": 100},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
]


# Each makes likelier what was said before, so a few tokens tell.
ALONE: list[dict[str, Any]] = [
    {"repetition_penalty": 0.4}, {"presence_penalty": -2.0}, {"frequency_penalty": -2.0}, {"logit_bias": {7: 9.0}},
]  # fmt: skip


@pytest.mark.parametrize("alone", ALONE, ids=str)
def test_each_setting_alone_is_not_greedy(alone):
    assert SamplingParams(temperature=0, seed=0).greedy
    assert not SamplingParams(temperature=0, seed=0, **alone).greedy


@pytest.mark.parametrize("alone", sweep(ALONE, ALONE[0]), ids=str)
def test_greedy_with_one_setting_alone_follows_the_rule(tiny, stepper, device, alone):
    n, count = tiny.tokenizer.num_tokens, device.pick(40, 12)
    prompt = [*IDS, 12, 12]
    reply = tiny.generate(prompt, temperature=0, max_tokens=count, ignore_eos=True, **alone).token_ids
    logits = forced_logits(stepper, prompt + reply, len(prompt))[:-1, :n]
    assert reply == [int(_adjusted(row, prompt, reply[:i], **alone).argmax()) for i, row in enumerate(logits)]
    assert reply != [int(row.argmax()) for row in logits]  # it made a difference


@pytest.mark.parametrize("penalties", sweep(PENALTIES, PENALTIES[1], PENALTIES[6]), ids=str)
def test_greedy_with_penalties_follows_the_rule(tiny, stepper, device, penalties):
    n = tiny.tokenizer.num_tokens
    how = {"temperature": 0, "max_tokens": device.pick(60, 16), "ignore_eos": True, "logit_bias": FAVOURITES}
    prompt = [*IDS, 12, 12]
    reply = tiny.generate(prompt, **how, **penalties).token_ids
    logits = forced_logits(stepper, prompt + reply, len(prompt))[:-1, :n]
    rule = {"logit_bias": FAVOURITES, **penalties}
    assert reply == [int(_adjusted(row, prompt, reply[:i], **rule).argmax()) for i, row in enumerate(logits)]
    assert reply != tiny.generate(prompt, **how).token_ids  # it made a difference
    for name in penalties:
        if name != "repetition_window":
            less = {k: v for k, v in rule.items() if k != name}
            assert reply != [int(_adjusted(row, prompt, reply[:i], **less).argmax()) for i, row in enumerate(logits)]


def test_bias_changes_the_logits_and_nothing_else(tiny, device):
    n, count = tiny.tokenizer.num_tokens, device.pick(20, 4)
    forced = tiny.generate(IDS, temperature=0, max_tokens=count, ignore_eos=True, logit_bias={500: 1e4})
    assert forced.token_ids == [500] * count
    best = tiny.generate(IDS, temperature=0, max_tokens=1, ignore_eos=True).token_ids[0]
    y = current_logits(tiny)[:n].astype(np.float64)
    second = int(np.argsort(-y)[1])
    gap = float(y[best] - y[second])
    for bias, want in ((gap * 0.99, best), (gap * 1.01, second)):
        assert tiny.generate(
            IDS, temperature=0, max_tokens=1, ignore_eos=True, logit_bias={second: bias}
        ).token_ids == [want]
    banned = {int(i): -100.0 for i in np.argsort(-y)[:50]}
    assert not set(_draws(tiny, device.pick(40, 5), logit_bias=banned, top_k=0)) & set(banned)


def test_biases_at_the_ends_of_their_range_keep_the_distribution(tiny, device):
    """The greatest bias leaves the tokens that it allows as likely among each other as their logits say."""
    n, allowed = tiny.tokenizer.num_tokens, [3, 40, 300, 301, 500, 700, 800, 900]
    for bias in (dict.fromkeys(allowed, 1e4), {i: -1e4 for i in range(n) if i not in allowed}):
        drawn = _draws(tiny, device.pick(150, 6), temperature=1.0, top_k=0, top_p=1.0, logit_bias=bias)
        _assert_drawn(drawn, current_logits(tiny)[:n].astype(np.float64), allowed)
        assert len(set(drawn)) > device.pick(4, 1)


def _draws(engine: Engine, count: int, **sampling: Any) -> list[int]:
    """First tokens of replies with the seeds 0, 1, … in turn."""
    replies = (engine.generate(IDS, max_tokens=1, seed=i, ignore_eos=True, **sampling) for i in range(count))
    return [reply.token_ids[0] for reply in replies]


def _assert_drawn(draws: list[int], y: Array, kept: Iterable[int], temperature: float = 1) -> None:
    """Holds ``_draws`` to the greatest of the logits that are left, each with the noise of seed, position and id."""
    kept = np.array(sorted(kept))
    for seed, token in enumerate(draws):
        score = y[kept] / temperature + gumbel(len(y), len(IDS), seed)[kept]
        assert score[kept == token].max(initial=-np.inf) > score.max() - 1e-3


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 4}, {"top_p": 0.05}, {"top_p": 0.12}, {"min_p": 0.5}, {"min_p": 0.3, "top_k": 6},
    {"top_p": 0.15, "min_p": 0.35, "top_k": 9},
]  # fmt: skip


@pytest.mark.parametrize("filters", sweep(FILTERS, FILTERS[1], FILTERS[6]), ids=str)
def test_filters_keep_what_the_rule_keeps(tiny, device, filters):
    n, draws = tiny.tokenizer.num_tokens, device.pick(150, 6)
    for adjust in ({}, {"logit_bias": {20: 3.0, 30: 3.5}, "repetition_penalty": 1.5}):
        full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **filters, **adjust}
        drawn = _draws(tiny, draws, **full)
        y = _adjusted(current_logits(tiny)[:n], IDS, [], **adjust)
        kept = _kept(y, **filters)
        _assert_drawn(drawn, y, kept)
        assert len(kept) < 40
        if device.emulated:
            continue  # few draws tell nothing about probabilities
        # Draws follow the probabilities that are left: none that is likely to come is missing.
        seen = Counter(drawn)
        p = {i: math.exp(y[i]) for i in kept}
        expected = {i: draws * v / sum(p.values()) for i, v in p.items()}
        assert all(seen[i] for i, times in expected.items() if times > 12)
        common = [i for i, times in expected.items() if times > 5]
        chi2 = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in common)
        assert chi2 <= len(common) + 5 * math.sqrt(2 * len(common))


def test_temperature_sharpens_and_flattens(tiny, device):
    n, draws = tiny.tokenizer.num_tokens, device.pick(300, 6)
    for temperature in (0.3, 1.0, 2.0):
        drawn = _draws(tiny, draws, temperature=temperature, top_k=5, top_p=1.0)
        y = current_logits(tiny)[:n].astype(np.float64)
        best = np.argsort(-y)[:5]
        _assert_drawn(drawn, y, best, temperature)
        if not device.emulated:  # few draws tell nothing about probabilities
            p = np.exp(y[best] / temperature) / np.exp(y[best] / temperature).sum()
            got = np.array([drawn.count(i) for i in best]) / draws
            assert np.abs(got - p).max() < 4 * math.sqrt(0.25 / draws)
    assert set(_draws(tiny, device.pick(20, 2), temperature=1e-38, top_k=0, top_p=1.0)) == {int(best[0])}


def test_temperature_zero_is_the_largest_logit(tiny, stepper, device):
    n = tiny.tokenizer.num_tokens
    reply = tiny.generate(IDS, max_tokens=device.pick(30, 10), temperature=0, ignore_eos=True).token_ids
    assert reply == forced_logits(stepper, IDS + reply, len(IDS))[:-1, :n].argmax(1).tolist()


def test_seeds(tiny, device):
    def reply(**sampling: Any) -> tuple[int, ...]:
        return tuple(tiny.generate(IDS, max_tokens=device.pick(12, 4), ignore_eos=True, **sampling).token_ids)

    assert reply(seed=5) == reply(seed=5)
    seeds = device.pick((0, 1, 2, 1 << 32, 1 << 33, (1 << 64) - 1), (0, 1 << 32, (1 << 64) - 1))
    assert len({reply(seed=s) for s in seeds}) == len(seeds)
    assert len({reply() for _ in range(device.pick(5, 2))}) == device.pick(5, 2)


def test_seed_counts_positions_not_steps(tiny):
    """A reply continued from its own beginning with the same seed is the same reply.

    Few tokens may be drawn, which no rounding exchanges.
    """
    how = {"seed": 5, "ignore_eos": True, "logit_bias": dict.fromkeys(range(100, 110), 30.0), "temperature": 20.0}
    whole = tiny.generate(IDS, max_tokens=12, **how).token_ids
    rest = tiny.generate(IDS + whole[:5], max_tokens=7, **how).token_ids
    assert whole[:5] + rest == whole
    assert len(set(whole)) > 3


def test_defaults_come_from_the_checkpoint(device, tmp_path):
    draft = tiny_draft()
    folder = draft.write(tmp_path / "m")
    with_generation_config(folder, do_sample=False, eos_token_id=5, top_k=3)
    with open_engine(folder) as engine:
        assert engine.info["sampling_defaults"] == {"temperature": 0.0, "top_k": 3}
        assert 5 in engine.info["stop_token_ids"]
        plain, greedy = engine.generate(IDS, max_tokens=9), engine.generate(IDS, max_tokens=9, temperature=0)
        assert plain.token_ids == greedy.token_ids
        assert len({tuple(engine.generate(IDS, max_tokens=9, temperature=1).token_ids) for _ in range(3)}) == 3


# ---- padding rows, damaged weights ----------------------------------------------------------------------------------


def _set_rows(value: float, rows: slice) -> Any:
    def change(values: Array) -> None:
        values[rows] = value

    return change


def test_padding_rows_are_never_drawn(device, tmp_path):
    """Ids without a token, made far likelier than all others, and biased as far as a request may go."""
    draft = edit_floats(tiny_draft(), "lm_head.biases", _set_rows(50.0, slice(993, 1008)))
    edit_floats(draft, "lm_head.biases", _set_rows(-50.0, slice(1008, None)))  # one of the halves, whatever the input
    with open_engine(draft.write(tmp_path / "m")) as engine:
        assert engine.tokenizer.num_tokens == 993
        seen: set[int] = set()
        for sampling in ({"temperature": 0}, {"temperature": 2.0, "top_k": 0}, {"top_p": 0.5, "logprobs": 20}):
            reply = engine.generate(IDS, max_tokens=device.pick(100, 8), seed=1, ignore_eos=True, **sampling)
            seen |= set(reply.token_ids) | {i for p in reply.logprobs or [] for i, _ in p.top}
        logits = current_logits(engine)
        assert logits[993:].max() > logits[:993].max() + 5
        assert max(seen) < 993
        assert engine.score(IDS, top_k=993).top_ids.max() < 993
        with pytest.raises(InvalidRequestError, match=r"token id 993 .*\(0 to 992\)"):
            engine.generate(IDS, logit_bias={993: 100.0})


WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"temperature": 0, "logprobs": 2}]


@pytest.mark.parametrize("value", sweep([math.nan, math.inf], math.nan))
@pytest.mark.parametrize("sampling", sweep(WAYS, WAYS[1]), ids=str)
def test_logits_that_are_not_finite_are_an_error(device, tmp_path, value, sampling):
    """Never token 0. The damage sits in one row of the head, or of the embedding: then other prompts still run."""
    head = edit_floats(tiny_draft(), "lm_head.scales", _set_rows(value, slice(500, 501)))
    with open_engine(head.write(tmp_path / "head")) as engine:
        for _ in range(2):
            with pytest.raises(DeviceError, match="not finite"):
                engine.generate(IDS, max_tokens=5, **sampling)
        with pytest.raises(DeviceError, match="not finite"):
            engine.score(IDS)
    embedding = edit_floats(tiny_draft(), "embed_tokens.scales", _set_rows(value, slice(500, 501)))
    with open_engine(embedding.write(tmp_path / "embedding")) as engine, open_engine(TINY) as sound:
        want = sound.generate(IDS, max_tokens=5, ignore_eos=True, **sampling).token_ids
        for prompt in ([500], [1, 500], [500, 1], [*IDS, 500, 1, 2])[: device.pick(4, 2)]:
            with pytest.raises(DeviceError, match="not finite"):
                engine.generate(prompt, max_tokens=5, **sampling)
            assert engine.generate(IDS, max_tokens=5, ignore_eos=True, **sampling).token_ids == want


def test_reply_that_runs_into_a_damaged_token(device, tmp_path):
    """The token itself is fine and is delivered; the next one has no logits."""
    with open_engine(TINY) as sound:
        whole = sound.generate(IDS, max_tokens=8, temperature=0, ignore_eos=True).token_ids
    bad = whole[5]
    at = whole.index(bad)
    assert bad not in IDS
    draft = edit_floats(tiny_draft(), "embed_tokens.scales", _set_rows(math.nan, slice(bad, bad + 1)))
    with open_engine(draft.write(tmp_path / "m")) as engine:
        stream = engine.stream(IDS, max_tokens=50, temperature=0, ignore_eos=True)
        got = [next(stream).token_ids[0] for _ in range(at + 1)]
        with pytest.raises(DeviceError, match=rf"position {len(IDS) + at + 1} "):
            next(stream)
        assert got == whole[: at + 1]
        assert engine.generate(IDS, max_tokens=at + 1, temperature=0, ignore_eos=True).token_ids == got


def test_damage_in_padding_rows_is_of_no_interest(device, tmp_path):
    draft = edit_floats(tiny_draft(), "lm_head.scales", _set_rows(math.nan, slice(993, None)))
    with open_engine(draft.write(tmp_path / "m")) as engine, open_engine(TINY) as sound:
        for sampling in ({"temperature": 0}, {"seed": 1, "logprobs": 3}):
            replies = [e.generate(IDS, max_tokens=9, **sampling).token_ids for e in (engine, sound)]
            assert replies[0] == replies[1]
        np.testing.assert_array_equal(engine.score(IDS).logprobs, sound.score(IDS).logprobs)


def test_failure_of_the_device_ends_one_request(tiny, device, monkeypatch):
    """An injected failure of a decode step: an error for this request, and the next one is right."""
    want = tiny.generate(IDS, max_tokens=9, temperature=0, ignore_eos=True).token_ids

    class Failing:
        def __init__(self, real: Any) -> None:
            self.real, self.calls, self.failed = real, 0, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def next(self) -> Any:
            self.calls += 1
            if self.calls == 4:
                self.failed = 4
                return None
            return self.real.next()

    make = reply_module._pipeline
    monkeypatch.setattr(reply_module, "_pipeline", lambda *arguments: Failing(make(*arguments)))
    with pytest.raises(DeviceError, match=f"{device.name} device"):
        tiny.generate(IDS, max_tokens=9, temperature=0, ignore_eos=True)
    monkeypatch.undo()
    reply = tiny.generate(IDS, max_tokens=9, temperature=0, ignore_eos=True)
    assert (reply.token_ids, reply.cached_tokens) == (want, 0)
