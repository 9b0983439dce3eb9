# SPDX-License-Identifier: Apache-2.0
"""Whole models through the Metal shaders as the emulated metal device of the engine's tests does not run them.

With float32 activations the shaders do the arithmetic of the cpu device's float32 paths, so that a mistake of any size
shows; with bfloat16 between kernels, rounding sets the tolerances; each is a figure seen.  Also: tensor operations, any
order of threads, and real widths, against mlx-lm and the cpu device.
Not handled: what holds on every device (test_engine_*.py); bytes moved (test_emulated_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_metal import emulated_engine
from engine_device import Target, isa_paths
from engine_harness import (
    SPLIT,
    TINY,
    Array,
    assert_rounded_logits,
    clear_tokens,
    environment,
    forced_logits,
    golden,
    log_softmax,
)
from models import SMALL, model_config, write_model
from msl_harness import HOST_THREADS, needs_clang
from reference import DeviceReference

from lily.engine import Engine

pytestmark = needs_clang

OPTIONS: dict[str, Any] = {"ablate": ["handoff"], "max_context": 512}  # without handoff tokens can be forced

# Float32 activations: nothing but the order of sums differs from the cpu device. For random-tiny, whose logits have an
# rms of 1, that makes 5.0e-5 at most.
ORDER_MAX = 2e-4
# At production width it also lets an element of K or V fall to the other side of a bfloat16 rounding, which alone makes
# 3.5e-4 (test_engine_real_shapes.py): 2.1e-4 at most and 3.4e-5 on average seen.
WIDE_MAX, WIDE_MEAN = 1e-3, 1e-4
# From mlx-lm the caches' rounding to bfloat16 differs as well: 8.5e-4 seen, 2e-3 expected (test_engine_golden.py).
CACHE_MAX = 4e-3

# With bfloat16 activations, of random-tiny: 0.060 at most and 0.0098 on average seen. Rounding between kernels comes on
# top of the rounding of a product's inputs, which makes 0.033 and 0.007 on the cpu device.
BF16 = 0.08, 0.013


@contextmanager
def cpu_engine(model: Path | None) -> Iterator[Engine]:
    """On the cpu device's best path that computes in float32."""
    isa = next(path for path in isa_paths() if not Target("cpu", path).rounds)
    with environment("LILY_CPU", isa):
        engine = Engine(model, device="cpu", **OPTIONS)
    with engine:
        yield engine


def shaders(model: Path | None, **options: Any) -> Any:
    """An engine on the emulated shaders."""
    return emulated_engine(model, **OPTIONS, workers=HOST_THREADS, **options)


def errors(got: Array, want: Array) -> tuple[float, float]:
    """(greatest, mean) difference."""
    error = np.abs(got - want)
    return float(error.max()), float(error.mean())


# ---- random weights, mlx-lm's logits ---------------------------------------------------------------------------------


def test_logits_are_the_cpus_where_activations_are_float32() -> None:
    tokens = golden(TINY)["tokens"].tolist()
    with cpu_engine(TINY) as engine:
        want = forced_logits(engine, tokens, SPLIT)
    with shaders(TINY, act="f32") as engine:
        got = forced_logits(engine, tokens, SPLIT)
    assert errors(got, want)[0] < ORDER_MAX
    mlx = golden(TINY)["prefill64_then_decode_logits"][SPLIT - 1 :]
    assert errors(got, mlx)[0] < CACHE_MAX
    assert (got.argmax(1) == mlx.argmax(1)).all()


OTHERS = [pytest.param(b, g, marks=pytest.mark.full) for b, g in ((4, 32), (4, 128), (8, 64), (8, 128))]


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), *OTHERS])
def test_every_quantization_gives_the_cpus_logits_in_float32(tmp_path: Path, bits: int, group: int) -> None:
    """All experts are active, so that no rounding changes a choice."""
    sizes = {**SMALL, "num_experts_per_tok": SMALL["num_experts"]}
    model = write_model(tmp_path / "m", model_config(**sizes, bits=bits, group_size=group))
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, 950, 40)]
    with cpu_engine(model) as engine:
        want = forced_logits(engine, tokens, 33)
    with shaders(model, act="f32") as engine:
        got = forced_logits(engine, tokens, 33)
    greatest, mean = errors(got / want.std(), want / want.std())
    assert greatest < WIDE_MAX
    assert mean < WIDE_MEAN


@pytest.mark.parametrize("metal", [320, 400], ids=["simdgroup", "tensor"])
def test_logits_and_scores_are_mlx_lms(metal: int) -> None:
    tokens = golden(TINY)["tokens"].tolist()
    with shaders(TINY, metal=metal) as engine:
        decode = forced_logits(engine, tokens, SPLIT)
        score = engine.score(tokens, top_k=20)
        scored = log_softmax(golden(TINY)["prefill_logits"][:-1, : engine.tokenizer.num_tokens])
    reference = DeviceReference(TINY)
    reference.forward(tokens, reference.new_cache())
    leads = np.min(reference.leads, 0)
    want = golden(TINY)["prefill64_then_decode_logits"][SPLIT - 1 :]
    assert_rounded_logits(decode, want, leads[SPLIT - 1 :], BF16)
    want = np.take_along_axis(scored, score.top_ids.astype(int), 1)
    assert_rounded_logits(score.top_logprobs, want, leads[:-1], BF16)


def test_any_order_gives_the_same_bits() -> None:
    tokens = golden(TINY)["tokens"][:24].tolist()
    logits = []
    for order in ("forward", "random"):
        with shaders(TINY, order=order, seed=7) as engine:
            logits.append(forced_logits(engine, tokens, 20))
    np.testing.assert_array_equal(*logits)


# ---- production width ------------------------------------------------------------------------------------------------


def text(count: int) -> list[int]:
    """Ids for the production models."""
    return np.random.default_rng(3).integers(0, 950, count).tolist()


def check_production(model: Path, prompt: int, steps: int, bf16: tuple[float, float]) -> None:
    """Prefill of ``prompt`` tokens and ``steps`` of decode, in both kinds of activations, against the cpu device."""
    tokens = text(prompt + steps)
    with cpu_engine(model) as engine:
        want = forced_logits(engine, tokens, prompt)
    assert 0.9 < want.std() < 1.1
    for act, (greatest, mean) in (("f32", (WIDE_MAX, WIDE_MEAN)), ("bf16", bf16)):
        with shaders(model, act=act) as engine:
            got = forced_logits(engine, tokens, prompt)
        seen = errors(got, want)
        assert seen[0] < greatest, act
        assert seen[1] < mean, act
        order = np.sort(want, 1)
        lead = order[:, -1] - order[:, -2]
        assert lead[got.argmax(1) != want.argmax(1)].max(initial=0) < 2 * greatest, act


def test_production_width_gives_the_cpus_logits(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 12}
    # Two layers round less often than four: 0.046 at most and 0.0093 on average seen.
    check_production(write_model(tmp_path / "m", model_config(**sizes)), 20, 4, bf16=(0.07, 0.014))


@pytest.mark.full
def test_four_layers_of_production_width_give_the_cpus_logits(tmp_path: Path) -> None:
    # 0.104 and 0.0205 seen.
    check_production(write_model(tmp_path / "m", model_config(num_experts=12)), 33, 7, bf16=(0.15, 0.028))


@pytest.mark.full
def test_the_largest_tiles_give_the_cpus_logits(tmp_path: Path) -> None:
    """Prompts of more than 128 rows run in tiles of 64. All experts are active: rounding changes no choice of them."""
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 8}
    # 0.048 and 0.0111 seen.
    check_production(write_model(tmp_path / "m", model_config(**sizes)), 130, 1, bf16=(0.07, 0.014))


# ---- the embedded model ----------------------------------------------------------------------------------------------

PROMPTS = (
    "Once upon a time", "One day, a little girl named Lily", "Tom and his dog", "The sun was",
    "There was a big tree in the park.", "Mom said", "Ben wanted to", "The cat was very hungry, so",
    "Sara and Tim went to the beach.", "The boy was sad because",
)  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


def test_replies_to_ten_prompts_are_the_cpus_up_to_the_first_close_choice() -> None:
    replies = []
    with cpu_engine(None) as engine:
        for prompt in PROMPTS:
            replies.append(clear_tokens(engine.generate(prompt, max_tokens=10, logprobs=2, **GREEDY)))
    assert min(map(len, replies)) >= 3, "too few clear tokens to compare"
    assert sum(map(len, replies)) >= 70
    with shaders(None) as engine:
        for prompt, want in zip(PROMPTS, replies, strict=True):
            assert engine.generate(prompt, max_tokens=len(want), **GREEDY).token_ids == want, prompt
