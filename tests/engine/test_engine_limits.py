# SPDX-License-Identifier: Apache-2.0
"""Limits of an engine: long replies, full contexts, bad requests, models that do not fit, closing.

What is refused is refused before anything runs, with one sentence that names the value and what is allowed.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_device import Target
from engine_harness import TINY, device_buffers, environment, memory_when_full, open_engine, policy

import lily
from lily.device.device import CommandList, Device
from lily.engine import Engine
from lily.errors import CheckpointError, ContextLengthError, DeviceError, InvalidRequestError, LilyError
from lily.kernels import MAX_STOP_IDS
from lily.run.budget import Budget
from lily.run.reply import Reply

IDS = [7, 300, 41, 5, 900, 41]  # a prompt for random-tiny
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(device: Target) -> Iterator[Engine]:
    """A small model with random weights: every logit counts."""
    with open_engine(TINY, max_context=2048) as engine:
        yield engine


# ---- long running ---------------------------------------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.sweep  # test_metal_shim_lists.py counts Metal's objects over 1,000 steps
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident size is read from /proc")
def test_memory_is_flat_over_2000_steps(tiny):
    how = {"max_tokens": 2000, "temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 1}
    sizes = []
    for _ in range(3):
        assert sum(len(c.token_ids) for c in tiny.stream(IDS, **how)) == 2000
        gc.collect()
        sizes.append(_resident_bytes())
    assert sizes[2] - sizes[0] < 1 << 20  # the first run grew the cache; 2,000 leaked objects of 512 bytes would show


# ---- limits and bad requests ----------------------------------------------------------------------------------------


def test_context_limits(device):
    with open_engine(TINY, max_context=20) as engine:
        assert engine.max_context == engine.info["max_context"] == 20
        reply = engine.generate([1] * 19, max_tokens=50, ignore_eos=True)
        assert (reply.completion_tokens, reply.finish_reason) == (1, "length")
        for count in (20, 21, 5000):
            with pytest.raises(ContextLengthError, match=rf"{count} tokens.* 20 "):
                engine.generate([1] * count, max_tokens=1)
        assert engine.generate([1] * 10, max_tokens=50, ignore_eos=True).completion_tokens == 10
        assert len(engine.score([1] * 20).logprobs) == 19
        with pytest.raises(ContextLengthError, match="21"):
            engine.score([1] * 22)


def test_max_context_bounds(device):
    for bad in (1, 4097):
        with pytest.raises(InvalidRequestError, match=rf"max_context is {bad}; allowed are 2 to 4096"):
            open_engine(TINY, max_context=bad)
    for wrong in (0, -5, 1.5, "9", True):
        with pytest.raises(InvalidRequestError, match=f"max_context is {wrong!r}; allowed"):
            open_engine(TINY, max_context=wrong)
    for good in (2, 4096):
        with open_engine(TINY, max_context=good) as engine:
            assert engine.generate([1], max_tokens=9, ignore_eos=True).completion_tokens == min(good - 1, 9)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"), ("", "empty"), ([-1], "token id -1"), ([1, 1024], r"token id 1024 .*0 to 1023"),
        ([1 << 70], "outside of the vocabulary"), ([1.5], "whole numbers"), (["a"], "whole numbers"),
        ([None], "whole numbers"), (None, "whole numbers"), (5, "whole numbers"), ([True], "whole numbers"),
        ([[1, 2]], "whole numbers"), (np.ones((2, 2), int), "whole numbers"), (b"abc", "whole numbers"),
        ({1: 2}, "whole numbers"), ("\ud800", "UTF-8|surrogate"), ({1}, "seen set"),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_prompts(tiny, prompt, words):
    with pytest.raises(InvalidRequestError, match=words):
        tiny.stream(prompt)  # before anything runs
    assert tiny.generate([1], max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; allowed: a whole number from 1 to 2147483647"),
        ({"max_tokens": 1 << 31}, "to 2147483647"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"logit_bias": {5: 10**400}}, r"logit_bias\[5\]"),
        ({"logit_bias": {5: 10_001}}, "from -10,000 to 10,000"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_window": 1 << 40}, "repetition_window"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": 1000}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "from 0 to 18446744073709551615"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": {5: math.inf}}, "logit_bias"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
        ({"logit_bias": {1024: 1}}, "1024"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "has 1025 entries; allowed: at most 1024"),
        ({"stop": [""]}, "empty"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [993]}, "993"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": range(MAX_STOP_IDS + 1)}, str(MAX_STOP_IDS)),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean temperature?"),
        ({"zzz": 1}, "unknown sampling parameter 'zzz'; known: max_tokens, "),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_sampling_values(tiny, sampling, words):
    with pytest.raises(InvalidRequestError, match=words) as raised:
        tiny.stream(IDS, **sampling)
    assert len(str(raised.value)) <= 500


def test_a_long_message_keeps_its_beginning_and_what_to_do():
    cause, remedy = "x" * 460, "; choose another folder"
    error = DeviceError(cause + "y" * 100 + remedy, again=True)
    assert error.again
    assert len(str(error)) == 500
    assert str(error).startswith("x" * 290)
    assert str(error).endswith(remedy)
    assert error.full == cause + "y" * 100 + remedy
    assert str(InvalidRequestError("z" * 500)) == "z" * 500


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.generate(iter([1, 2, 3])), "a prompt is text or a list of token ids .*; seen list_iterator"),
        (lambda e: e.score(iter([1, 2, 3])), "a list of token ids.*; seen list_iterator"),
        (lambda e: e.score("text"), r"tokenizer\.encode\(text\)"),
        (lambda e: e.score(5), "a list of token ids"),
        (lambda e: e.generate(IDS, temperature=10**5000), "temperature is a number of thousands of digits"),
        (lambda e: e.generate([10**5000]), "token id a number of thousands of digits"),
        (lambda e: open_engine(TINY, max_context=10**5000), "max_context is a number of thousands of digits"),
        (lambda e: e.generate(IDS, {"max_tokens": 5}), "of type dict; allowed: a SamplingParams"),
        (lambda e: e.chat(HELLO, template_kwargs={1: 2}), r"template_kwargs is \{1: 2\}; allowed: a mapping of names"),
        (lambda e: e.chat(HELLO, template_kwargs=[1]), r"template_kwargs is \[1\]"),
        (lambda e: e.session(template_kwargs="ab"), "template_kwargs is 'ab'"),
        (lambda e: e.session().send(None), "the message is None; allowed: text, or a mapping"),
        (lambda e: e.session().send(5), "the message is 5"),
        (lambda e: e.session().send({1: 2}), "role"),
        (lambda e: e.tokenizer.decode([1.5]), "a token id is 1.5; allowed: a whole number"),
        (lambda e: e.tokenizer.decode(5), "the token ids are 5; allowed: a list"),
        (lambda e: open_engine(TINY, ablate=5), "ablate is 5; allowed: names of mechanisms"),
        (lambda e: open_engine(TINY, ablate=[5]), "unknown ablation 5"),
    ],
)  # fmt: skip
def test_what_is_no_argument_of_a_call_is_named(tiny, call, words):
    with pytest.raises(InvalidRequestError, match=words):
        call(tiny)


def test_extreme_but_legal_values(tiny):
    for sampling in (
        {"top_k": (1 << 31) - 1},
        {"top_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 100},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 100},
        {"repetition_window": (1 << 31) - 1, "repetition_penalty": 2},
        {"logit_bias": dict.fromkeys(range(990), -1e4)},
        {"logit_bias": {}},
        {"seed": np.int64(5)},
        {"max_tokens": np.int32(3)},
        {"stop_token_ids": {1, 2}},
        {"stop": ()},
        {"stop": None},
    ):
        reply = tiny.generate(IDS, **{"max_tokens": 3, "ignore_eos": True, **sampling})
        assert 1 <= reply.completion_tokens <= 3
        assert all(0 <= t < 993 for t in reply.token_ids)


@pytest.mark.parametrize(
    ("ids", "top_k", "words"),
    [
        ([], 0, "at least 2"),
        ([1], 0, "at least 2"),
        ([1, 993], 0, "993"),
        ([1, 2], 994, "0 to 993"),
        ([1, 2], -1, "top_k"),
        ([1, 2], "5", "top_k"),
        ([1, 2], True, "top_k"),
        ("text", 0, "token ids"),
        ([1, -1], 0, "-1"),
    ],
    ids=repr,
)
def test_bad_scores(tiny, ids, top_k, words):
    with pytest.raises(InvalidRequestError, match=words):
        tiny.score(ids, top_k)


def test_unknown_device_and_ablation():
    with pytest.raises(InvalidRequestError, match="unknown device 'tpu'; known: cpu, metal"):
        Engine(TINY, device="tpu")
    with pytest.raises(InvalidRequestError, match=r"unknown ablation 'magic'.*overlap"):
        Engine(TINY, ablate=["magic"])


def test_options_of_the_cpu_device():
    for threads in (0, -1, 1 << 20):
        with pytest.raises(LilyError, match="threads"):
            open_engine(TINY, threads=threads)
    with pytest.raises(LilyError, match=r"mmx.*portable"), environment("LILY_CPU", "mmx"):
        open_engine(TINY)


def test_model_that_does_not_fit(device, monkeypatch):
    with open_engine(TINY, max_context=4096) as engine:
        memory = engine.info["memory"]
    budget = Budget(memory["weights"], 1 << 62, "use a smaller model")
    monkeypatch.setattr("lily.engine.Budget.of", lambda _: budget)
    with pytest.raises(DeviceError, match=r"random-tiny does not fit: it needs 0\.\d+ GB \(weights .*smaller model"):
        open_engine(TINY)
    larger = replace(budget, total=memory["total"] - 1000 * memory["kv_per_token"])
    monkeypatch.setattr("lily.engine.Budget.of", lambda _: larger)
    with pytest.raises(DeviceError, match="smaller max_context"):
        open_engine(TINY, max_context=4096)
    with open_engine(TINY) as engine:
        assert 2000 < engine.max_context < 3200  # what fits


def test_the_sum_of_memory_is_what_an_engine_takes(device):
    """The sum decides whether a model fits and how long its context is."""
    small = policy(chunks=((0, 32),), buckets=(8, 32))
    with small, device_buffers() as made, open_engine(TINY, max_context=40) as engine:
        assert memory_when_full(engine, made) == engine.info["memory"]["total"]


# ---- life and death -------------------------------------------------------------------------------------------------


def test_info_names_what_runs(tiny, device):
    info = tiny.info
    assert info["model"] == "random-tiny"
    assert info["device"]["name"] == device.name
    if device.name == "cpu":
        assert info["device"]["isa"] in info["device"]["isas"]
    else:
        assert info["device"]["chip"]
        assert info["device"]["shaders"] in ("source", "metallib")
    assert (info["layers"], info["hidden_size"], info["experts"], info["vocab_size"]) == (4, 256, 8, 1024)
    assert info["memory"]["kv_per_token"] == 2 * 2 * 256 * 2  # K and V, 2 heads of 256, bf16, one attention layer


def test_closed_engine(tiny):
    engine = open_engine(TINY)
    pending = engine.stream(IDS, max_tokens=3)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate(IDS), lambda: engine.stream(IDS), lambda: engine.score(IDS), lambda: next(pending),
        lambda: engine.chat([{"role": "user", "content": "Hi"}]), lambda: engine.session().send("Hi"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="closed"):
            call()
    assert engine.info["model"] == "random-tiny"
    assert engine.tokenizer.encode("a") == tiny.tokenizer.encode("a")


def test_closing_cancels_a_stream_that_nobody_is_reading(device):
    """Whatever thread has read it last; one of a pool is still there, but will not go on by itself."""
    for read in (lambda stream: next(stream), lambda stream: pool.submit(next, stream).result()):
        with ThreadPoolExecutor(1) as pool:
            engine = open_engine(TINY)
            stream = engine.stream(IDS, max_tokens=50, ignore_eos=True)
            read(stream)
            engine.close()
            assert list(stream) == []
            with pytest.raises(InvalidRequestError, match="closed"):
                engine.generate(IDS)


def test_a_stream_that_is_cancelled_in_its_prompt_ends_with_the_chunk(device, monkeypatch):
    submit, chunks = Device.submit, []
    with policy(chunks=((0, 8),), buckets=(8,)), open_engine(TINY) as engine:
        stream = engine.stream([1] * 40, max_tokens=3)

        def cancelling(on: Device, lists: Any) -> int:
            chunks.append(lists)
            stream.cancel()
            return submit(on, lists)

        monkeypatch.setattr(Device, "submit", cancelling)
        assert list(stream) == []
        assert len(chunks) == 1
        monkeypatch.undo()
        assert engine.generate([1] * 40, max_tokens=3, ignore_eos=True).completion_tokens == 3


@pytest.mark.parametrize("recorded", [0, 1])
def test_lists_that_cannot_be_recorded_leave_none_behind(device, monkeypatch, recorded):
    """A plan is recorded twice, for either direction between the state slots; here the first or second fails."""
    record, made = Device.record, []

    def failing(on: Device, *arguments: Any) -> CommandList:
        if len(made) == recorded:
            raise DeviceError("injected")
        made.append(record(on, *arguments))
        return made[-1]

    with open_engine(TINY) as engine:
        monkeypatch.setattr(Device, "record", failing)
        with pytest.raises(DeviceError, match="injected"):
            engine.generate(IDS, max_tokens=1)
        assert len(made) == recorded
        assert not any(item.handle for item in made)
        monkeypatch.undo()
        assert engine.generate(IDS, max_tokens=2, ignore_eos=True).completion_tokens == 2


def test_error_inside_a_with_block_is_not_hidden(device):
    def work() -> None:
        with open_engine(TINY) as engine:
            stream = engine.stream(IDS, max_tokens=50, ignore_eos=True)
            next(stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_closing_waits_for_the_calls_of_other_threads(device, monkeypatch):
    """What runs comes to its end, what waits is told that the engine is closed."""
    engine, tokens = open_engine(TINY), device.pick(40, 8)
    following, started, closing = Reply.next, threading.Event(), threading.Event()

    def held_up(self: Reply) -> Any:
        started.set()
        closing.wait()
        return following(self)

    monkeypatch.setattr(Reply, "next", held_up)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(engine.generate, IDS, max_tokens=tokens, ignore_eos=True)
        started.wait()
        closers = [pool.submit(engine.close) for _ in range(2)]
        while not engine._closed:
            threading.Event().wait(0.001)
        closing.set()
        assert running.result().completion_tokens == tokens
        assert [closer.result() for closer in closers] == [None, None]
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.generate(IDS)


def test_engine_that_nobody_holds_gives_its_memory_back(device):
    with device_buffers() as made:
        open_engine(TINY).generate(IDS, max_tokens=2)
        gc.collect()
    assert len(made) > 10
    assert not any(buffer.handle for buffer in made)


def test_failed_opening_gives_its_memory_back(device, monkeypatch):
    def fail(*_: Any) -> None:
        raise CheckpointError("injected")

    monkeypatch.setattr("lily.engine.Weights.load", fail)
    with device_buffers() as made, pytest.raises(CheckpointError, match="injected"):
        open_engine(TINY)
    assert made
    assert not any(buffer.handle for buffer in made)


def test_two_engines_side_by_side(tiny, device):
    want = tiny.generate(IDS, max_tokens=9, seed=3).token_ids
    with open_engine(TINY, **({"threads": 1} if device.name == "cpu" else {})) as other:
        a, b = tiny.stream(IDS, max_tokens=9, seed=3), other.stream(IDS, max_tokens=9, seed=3)
        pairs = list(zip(a, b, strict=True))
    assert [x.token_ids[0] for x, _ in pairs] == [y.token_ids[0] for _, y in pairs] == want


def test_names_of_the_package():
    assert {"Engine", "Completion", "LilyError", "SamplingParams", "Session"} <= set(lily.__all__)
    assert all(getattr(lily, name) is not None for name in lily.__all__)
    assert issubclass(ContextLengthError, LilyError)
    assert issubclass(InvalidRequestError, LilyError)
