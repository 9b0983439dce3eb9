# SPDX-License-Identifier: Apache-2.0
"""Lily's side of the comparison. usage: lily_worker.py MODEL THREADS; answers each line on stdin with one round.

Prompts are token ids, so that no tokenizer takes part; the state is reset before each round.
"""

from __future__ import annotations

import json
import sys
import time

import lily


def forget(engine: lily.Engine) -> None:
    """Nothing is there for the next prompt."""
    for sequence in engine._residents.sequences:
        sequence.reset()


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    engine = lily.Engine(model, device="cpu", threads=threads, max_context=4096)
    vocab = engine.tokenizer.num_tokens
    print(json.dumps({"ready": engine.info["device"], "version": lily.__version__}), flush=True)
    for line in sys.stdin:
        prompt, steps = json.loads(line)
        ids = [i * 2654435761 % 2**32 % vocab for i in range(prompt)]
        forget(engine)
        stream = engine.stream(ids, max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        next(stream)
        first = time.perf_counter()
        count = sum(1 for _ in stream)
        end = time.perf_counter()
        print(json.dumps({"prefill": prompt / (first - begin), "decode": count / (end - first)}), flush=True)


main()
