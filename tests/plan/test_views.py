# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a plan writes inside of the memory that its plan gives it.

The dispatches run on the cpu device, each view an array of its own between guard zones, from zeroed memory.
Not handled: what is read (test_emulated_bytes.py does that for decode), and views that are larger than needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import Array, Call, run_calls
from kernel_harness import open_device, request, step
from models import model_config

from lily.checkpoint.config import ModelConfig
from lily.plan import Builder, Plan, decode_plan, prefill_plan, sample_plan
from lily.plan.views import View
from lily.policy import policy_for

CONFIG = ModelConfig.from_dict(model_config(), "config")
ROWS, BUCKET, POSITION, KV_TOKENS = 20, 32, 7, 64


def builder(rows: int, ablate: str = "") -> Builder:
    return Builder(CONFIG, policy_for("cpu", [ablate] if ablate else []), rows=rows, kv_tokens=KV_TOKENS)


PLANS = {
    "decode": lambda: decode_plan(builder(1)),
    "decode in parts": lambda: decode_plan(builder(1, "expert-fusion")),
    "prefill": lambda: prefill_plan(builder(BUCKET)),
    "score": lambda: prefill_plan(builder(BUCKET), score_top=3),
    "greedy": lambda: sample_plan(builder(1), greedy=True, logprobs=False),
    "sample": lambda: sample_plan(builder(1), greedy=False, logprobs=True),
}


def calls_of(plan: Plan, rows: int) -> list[Call]:
    """The dispatches of a plan, of which equal views are one array."""
    arrays: dict[tuple[str, int, int], Array] = {}

    def array(name: str, view: View) -> Array:
        key = (view.buffer, view.offset, view.nbytes)
        if key not in arrays:
            made = {"step": step(POSITION, rows), "request": request(CONFIG.vocab_size, top_logprobs=3, temperature=1)}
            arrays[key] = made.get(name, np.zeros(view.nbytes, np.uint8))
            assert arrays[key].nbytes == view.nbytes
        return arrays[key]

    return [
        Call(
            d.kernel.name,
            {a.name: array(a.name, v) for a, v in zip(d.kernel.args, d.views, strict=True)},
            dict(zip([name for name, _ in d.kernel.params], d.params, strict=True)),
            dict(zip(d.kernel.constants, d.constants, strict=True)),
            d.grid,
            d.threads,
        )
        for d in plan.dispatches
    ]


@pytest.mark.parametrize("name", PLANS)
def test_kernels_write_inside_of_their_views(name: str) -> None:
    plan = PLANS[name]()
    run_calls(open_device(), calls_of(plan, ROWS if name in ("prefill", "score") else 1))
