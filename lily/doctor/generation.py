# SPDX-License-Identifier: Apache-2.0
"""The embedded model from end to end: tokens a second, and the first token after a rest.

Prompts begin with different random tokens, so that nothing is taken over from the request before.
Not handled: the real model, whose checkpoint may not be here (``lily generate -m ... --verbose`` measures it).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from lily.engine import Engine
from lily.errors import DeviceError

PROMPT_TOKENS = 16
REPLY_TOKENS = 64
REST = 2.0  # seconds without a request
_RUNS = 3
_RESTS = 2


def generation(device: str, threads: int | None = None, rest: float = REST) -> dict[str, Any]:
    """Raises LilyError where the engine does not open or a request fails."""
    start = time.perf_counter()
    with Engine(None, device=device, threads=threads, max_context=1024) as engine:
        load = time.perf_counter() - start
        prompts = _prompts(engine)
        _reply(engine, next(prompts))
        warm = [_reply(engine, next(prompts)) for _ in range(_RUNS)]
        rested = []
        for _ in range(_RESTS):
            time.sleep(rest)
            rested.append(_reply(engine, next(prompts)))
    return {
        "model": engine.model.name,
        "prompt_tokens": PROMPT_TOKENS,
        "reply_tokens": REPLY_TOKENS,
        "load_s": load,
        "token_s": statistics.median(r["token_s"] for r in warm),
        "tokens_per_s": 1 / statistics.median(r["token_s"] for r in warm),
        "first_token_s": statistics.median(r["first_token_s"] for r in warm),
        "rest_s": rest,
        "first_token_after_rest_s": statistics.median(r["first_token_s"] for r in rested),
        "token_after_rest_s": statistics.median(r["token_s"] for r in rested),
    }


def _prompts(engine: Engine) -> Iterator[list[int]]:
    """Noise, then the beginning of a story, so that the reply is long enough to be measured."""
    story = engine.tokenizer.encode("Once upon a time")
    noise = np.random.default_rng(1)
    while True:
        yield [*noise.integers(1000, 3000, PROMPT_TOKENS - len(story)).tolist(), *story]


def _reply(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Seconds until the first token, and per token after it, as the caller of a stream sees them."""
    start = time.perf_counter()
    first, last, count = 0.0, 0.0, 0
    with engine.stream(prompt, max_tokens=REPLY_TOKENS, temperature=0.0, seed=1) as chunks:
        for chunk in chunks:
            now = time.perf_counter() - start
            if chunk.token_ids:
                first, last, count = first or now, now, count + len(chunk.token_ids)
    if count < 2:
        raise DeviceError(f"the embedded model wrote {count} tokens instead of a story")
    return {"first_token_s": first, "token_s": (last - first) / (count - 1)}
