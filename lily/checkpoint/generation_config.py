# SPDX-License-Identifier: Apache-2.0
"""generation_config.json: a checkpoint's sampling defaults and end-of-text ids. Optional; unknown keys are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lily.checkpoint.strict_json import read_object, show
from lily.errors import CheckpointError

# Key -> lowest, highest, integer only.
_NUMBERS = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "top_k": (0, 1 << 31, True),
    "repetition_penalty": (0.0, 100.0, False),
}


def read_generation_config(path: Path, vocab_size: int) -> dict[str, Any]:
    """The file's values without nulls, {} where there is no file; raises CheckpointError on a value of no sense."""
    if not os.path.lexists(path):
        return {}
    values = {key: value for key, value in read_object(path).items() if value is not None}
    for key, (low, high, integer) in _NUMBERS.items():
        value = values.get(key, low)
        if type(value) not in ((int,) if integer else (int, float)) or not low <= value <= high:
            kind = "an integer" if integer else "a number"
            raise CheckpointError(f"{path}: {key} is {show(value)}, expected {kind} from {low:g} to {high:g}")
    if type(values.get("do_sample", True)) is not bool:
        raise CheckpointError(f"{path}: do_sample is {show(values['do_sample'])}, expected true or false")
    for token in eos_token_ids(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            allowed = f"ids from 0 to {vocab_size - 1}"
            raise CheckpointError(f"{path}: eos_token_id has {show(token)}, expected {allowed}")
    return values


def eos_token_ids(generation_config: dict[str, Any]) -> tuple[Any, ...]:
    """The value of `eos_token_id` as a tuple, whether it is one id, a list or absent."""
    value = generation_config.get("eos_token_id", [])
    return tuple(value) if isinstance(value, list) else (value,)
