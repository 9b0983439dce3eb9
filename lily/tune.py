# SPDX-License-Identifier: Apache-2.0
"""Measuring which value of a device's option is faster on this machine with a model (``lily tune``).

Not handled: keeping what was found (``lily/device/tuned.py``); several options at once; prompts, since the measure is
decode.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lily.device.kinds import Option, environment_options, kind_of
from lily.errors import DeviceError, InvalidRequestError

if TYPE_CHECKING:
    from lily.engine import Engine

MARGIN = 0.02  # a gain below it is not worth another path
WARM_UP = 8  # tokens before the clock counts
PROMPT = "Once upon a time"


@dataclass
class Result:
    """Milliseconds per token of each round by the option's value; ``problem``: why the other value could not run."""

    option: Option
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def gain(self) -> float:
        """By how much of the default's median the other value is faster; negative if it is slower."""
        default, other = (statistics.median(self.milliseconds[v]) for v in self.option.values)
        return 1 - other / default

    @property
    def winner(self) -> str:
        """The other value only where its slowest round beats the default's fastest, and by a margin in the median."""
        if self.problem is not None:
            return self.option.default
        default, other = (self.milliseconds[v] for v in self.option.values)
        return self.option.other if max(other) < min(default) and self.gain >= MARGIN else self.option.default


Opener = Callable[[], "Engine"]


def measure(device: str, option: Option, open_engine: Opener, *, rounds: int = 3, tokens: int = 128) -> Result:
    """Decodes with both values in turn, each round in an engine of its own; the first of a round alternates.

    ``open_engine`` opens the model on ``device``, which takes ``option``. DeviceError if that fails with the default
    value.
    """
    if rounds < 2:
        raise InvalidRequestError(f"{rounds} rounds tell nothing about noise; at least 2 are needed")
    variable = kind_of(device).options_variable
    if option.name in environment_options(device):
        raise InvalidRequestError(f"{variable} sets {option.name}, which is to be measured; take it out of {variable}")
    result = Result(option, {value: [] for value in option.values})
    replies: set[tuple[int, ...]] = set()
    for number in range(rounds):
        for value in option.values if number % 2 == 0 else reversed(option.values):
            try:
                milliseconds, reply = _decode(variable, f"{option.name}={value}", open_engine, tokens)
            except DeviceError as error:
                if value == option.default:
                    raise
                result.problem = str(error)
                return result
            result.milliseconds[value].append(milliseconds)
            replies.add(reply)
    if len(replies) > 1:  # the same kernels on the same numbers: something was not waited for
        result.problem = f"the replies differ with {option.name}={option.other}"
    return result


def _decode(variable: str, setting: str, open_engine: Opener, tokens: int) -> tuple[float, tuple[int, ...]]:
    """(milliseconds per token, the tokens) with ``setting`` added to the environment variable."""
    before = os.environ.get(variable)
    os.environ[variable] = f"{before or ''} {setting}"
    try:
        with open_engine() as engine:
            greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
            engine.generate(PROMPT, max_tokens=WARM_UP, **greedy)
            reply = engine.generate(PROMPT, max_tokens=tokens, **greedy)
            return 1e3 / reply.timings.generation_tokens_per_second, tuple(reply.token_ids)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
