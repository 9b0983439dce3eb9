# SPDX-License-Identifier: Apache-2.0
"""generation_config.json: a checkpoint's sampling defaults and end-of-text ids. Optional; unknown keys are kept.

What a request may not ask for is refused here as well, by the same check (``lily.sampling``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lily.checkpoint.strict_json import read_object
from lily.errors import CheckpointError, InvalidRequestError, show
from lily.sampling import CHECKPOINT_DEFAULTS, SamplingParams

GENERATION_CONFIG_FILE = "generation_config.json"


def read_generation_config(path: Path, vocab_size: int) -> dict[str, Any] | None:
    """The file's values without nulls, None where there is no file; raises CheckpointError on a value of no sense.

    ``top_k`` may be a whole number written as 20.0, and -1 for off, as other engines write it; here it is 20 or 0.
    """
    if not os.path.lexists(path):
        return None
    values = {key: value for key, value in read_object(path).items() if value is not None}
    if "top_k" in values:
        values["top_k"] = _top_k(values["top_k"])
    try:
        SamplingParams(**{name: values[name] for name in CHECKPOINT_DEFAULTS if name in values})
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {str(error)[:300]}; mend the file or remove it") from None
    if type(values.get("do_sample", True)) is not bool:
        raise CheckpointError(f"{path}: do_sample is {show(values['do_sample'])}, expected true or false")
    for token in eos_token_ids(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            allowed = f"ids from 0 to {vocab_size - 1}"
            raise CheckpointError(f"{path}: eos_token_id has {show(token)}, expected {allowed}")
    return values


def eos_token_ids(generation_config: dict[str, Any]) -> tuple[Any, ...]:
    """The value of ``eos_token_id`` as a tuple, whether it is one id, a list or absent."""
    value = generation_config.get("eos_token_id", [])
    return tuple(value) if isinstance(value, list) else (value,)


def _top_k(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return 0 if value == -1 and not isinstance(value, bool) else value
