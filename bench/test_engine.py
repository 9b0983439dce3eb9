# SPDX-License-Identifier: Apache-2.0
"""Regression benchmarks of the engine on the embedded model (or on LILY_BENCH_MODEL): prompt, decode, load, sampling.

Absolute times mean little on a noisy machine; compare runs of one machine with ``pytest --benchmark-compare``.
"""

from __future__ import annotations

import os

import pytest

import lily

MODEL = os.environ.get("LILY_BENCH_MODEL")
PROMPT = 512
STEPS = 64


@pytest.fixture(scope="module")
def engine():
    with lily.Engine(MODEL, max_context=4096) as engine:
        yield engine


@pytest.fixture
def prompt(engine):
    n = engine.tokenizer.num_tokens
    return [i * 2654435761 % 2**32 % n for i in range(PROMPT)]


def forget(engine):
    """Nothing is there for the next prompt."""
    for sequence in engine._residents.sequences:
        sequence.reset()


def rate(benchmark, tokens):
    benchmark.extra_info["tokens per second"] = round(tokens / benchmark.stats.stats.median, 1)


def test_prefill(benchmark, engine, prompt):
    """A prompt of 512 tokens to its first token."""

    def run():
        forget(engine)
        engine.generate(prompt, max_tokens=1, temperature=0.0)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    rate(benchmark, PROMPT)


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "usual": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1},
    "everything": {
        "temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.1, "logprobs": 20, "seed": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("how", list(SAMPLING))
def test_decode(benchmark, engine, prompt, how):
    """64 tokens after a prompt of 512, the prompt not counted."""

    def start():
        forget(engine)
        stream = engine.stream(prompt, max_tokens=STEPS + 1, ignore_eos=True, **SAMPLING[how])
        next(stream)
        return (stream,), {}

    def run(stream):
        for _ in stream:
            pass

    benchmark.pedantic(run, setup=start, rounds=5, warmup_rounds=1)
    rate(benchmark, STEPS)


def test_second_turn(benchmark, engine):
    """A chat's second turn: only what is new is run."""
    first = [{"role": "user", "content": "Tell me a story about a cat and a dog. " * 20}]
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    reply = engine.chat(first, **options)
    second = [*first, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "And then?"}]

    def start():
        forget(engine)
        engine.chat(first, **options)

    done = benchmark.pedantic(lambda: engine.chat(second, **options), setup=start, rounds=5, warmup_rounds=1)
    benchmark.extra_info["cached tokens"] = done.cached_tokens
    assert done.cached_tokens > done.prompt_tokens // 2


def test_load(benchmark):
    """From nothing to a ready engine; the files are in the page cache."""

    def run():
        lily.Engine(MODEL, max_context=1024).close()

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
