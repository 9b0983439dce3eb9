# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's side of the comparison, where mlx is installed.

Usage: mlx_worker.py MODEL PROMPT STEPS.  On a CPU mlx-lm needs seconds for a token at these shapes, so it does not take
turns: one run, one line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main() -> None:
    path, prompt, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model, config = load_model(path)
    mx.eval(model.parameters())
    vocab = config["text_config"]["vocab_size"]
    cache = make_prompt_cache(model)
    begin = time.perf_counter()
    mx.eval(model(mx.array([[i * 2654435761 % 2**32 % vocab for i in range(prompt)]]), cache=cache))
    first = time.perf_counter()
    for i in range(steps):
        mx.eval(model(mx.array([[i * 7919 % vocab]]), cache=cache))
    end = time.perf_counter()
    print(json.dumps({"prefill": prompt / (first - begin), "decode": steps / (end - first)}))


main()
