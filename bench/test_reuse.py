# SPDX-License-Identifier: Apache-2.0
"""What earlier turns spare: the first token of a second turn beside that of a cold one, and a chat's tokens again.

Ratios within one run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import pytest

import lily
from lily.text.segments import MARK
from lily.text.tokenizer import Tokenizer

HISTORY = 4096  # tokens
ROUNDS = 5


def test_second_turn(benchmark):
    """Asked: at a history of 4,096 tokens at least ten times as soon."""
    with lily.Engine(max_context=8192) as engine:
        first = engine.render_chat([{"role": "user", "content": "Tell me of a cat. " * (HISTORY // 6)}])
        how = {"max_tokens": 1, "temperature": 0.0}
        colds, warms = [], []

        def turn() -> None:
            for sequence in engine._residents.sequences:
                sequence.reset()
            colds.append(engine.generate(first, **how).timings.prompt_seconds)
            warm = engine.generate([*first, *engine.tokenizer.encode(" And then?")], **how)
            assert warm.cached_tokens >= len(first) - 64
            warms.append(warm.timings.prompt_seconds)

        benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    ratio = median(colds) / median(warms)
    benchmark.extra_info["times as soon"] = round(ratio, 1)
    assert ratio >= 10


def test_a_conversation_from_disk(benchmark, tmp_path):
    """With one sequence two conversations take each other's place: the first token beside that of a cold prompt."""
    with lily.Engine(max_context=8192, sequences=1, cache_dir=tmp_path) as engine:
        prompts = [engine.tokenizer.encode(f"{n} " + "Tell me of a cat. " * (HISTORY // 6)) for n in range(2)]
        how = {"max_tokens": 1, "temperature": 0.0}
        colds = [engine.generate(prompt, **how).timings.prompt_seconds for prompt in prompts]
        warms = []

        def turns() -> None:
            for prompt in prompts:
                warm = engine.generate([*prompt, *engine.tokenizer.encode(" And then?")], **how)
                assert warm.cached_tokens >= len(prompt) - 64
                warms.append(warm.timings.prompt_seconds)

        benchmark.pedantic(turns, rounds=ROUNDS, warmup_rounds=1)
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
    benchmark.extra_info["times as soon"] = round(median(colds) / median(warms), 1)
    benchmark.extra_info["megabytes of a conversation"] = round(size / len(prompts) / 1e6, 1)


def test_tokens_of_a_long_chat_again(benchmark):
    """50,000 tokens of messages, of which the last one is new."""
    data = os.environ.get("LILY_TEST_DATA")
    if not data:
        pytest.skip("LILY_TEST_DATA is not set: no tokenizer of the real model")
    tokenizer = Tokenizer.from_dir(Path(data) / "tokenizer", 248_320)
    chat = "".join(f"{MARK}user\nmessage {n}: {'some words of a long chat ' * 80}<|im_end|>\n" for n in range(120))
    began = time.perf_counter()
    tokenizer.encode(chat)
    first = time.perf_counter() - began
    turns = iter(range(1000))
    benchmark.pedantic(lambda: tokenizer.encode(f"{chat}{MARK}user\n{next(turns)}"), rounds=20, warmup_rounds=1)
    benchmark.extra_info["times as fast"] = round(first / benchmark.stats.stats.median, 1)
