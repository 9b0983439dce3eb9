# SPDX-License-Identifier: Apache-2.0
"""The reference itself is held to mlx-lm: float32 logits on two random checkpoints, 96 positions each."""

from __future__ import annotations

import numpy as np
import pytest
from paths import DATA
from reference import Reference


@pytest.mark.parametrize("name", ["random-tiny", "random-tiny-vl"])
def test_reference_matches_mlx_lm(name):
    golden = np.load(DATA / name / "golden_mlx_lm_f32.npz")
    reference = Reference(DATA / name)
    whole = reference.forward(golden["tokens"], reference.new_cache())
    assert np.abs(whole - golden["prefill_logits"]).max() < 5e-5
    cache = reference.new_cache()
    parts = [reference.forward(golden["tokens"][:64], cache)]
    parts += [reference.forward([t], cache) for t in golden["tokens"][64:]]
    assert np.abs(np.concatenate(parts) - golden["prefill64_then_decode_logits"]).max() < 5e-5
