# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the sampler: checked values, defaults from the checkpoint, and their form on the device.

Order of operations, as mlx-lm's: logit bias, repetition penalty, presence and frequency penalties; then, on
probabilities at temperature 1, top-p, min-p, top-k; then the draw at the temperature.  The arithmetic is in the kernel
table (``sample_*``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lily.errors import InvalidRequestError
from lily.kernels import MAX_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS
from lily.text.stops import check_stops

CHECKPOINT_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a checkpoint's generation_config.json may set."""

_SEED_LIMIT = 1 << 64
_INT_LIMIT = (1 << 31) - 1  # of the device's Request record
_BIAS_LIMIT = 1e9  # far beyond any logit, and within float32
_LEAST_TEMPERATURE = 1e-6  # below it logits over temperature would leave float32; the draw is the greatest logit anyway
_SAME_NAMES = (
    "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How a reply is drawn and when it ends. Constructing it checks every value (InvalidRequestError)."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """Keep this many; 0 is off."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the last `repetition_window` of prompt and reply."""
    repetition_window: int = 20
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the reply already has."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the reply."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> added to its logit."""
    seed: int | None = None
    """Same seed, same prompt, same device: same reply. None draws a seed."""
    stop: Sequence[str] | str = ()
    """Strings that end the reply; they are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the reply, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (for benchmarks)."""
    logprobs: int | None = None
    """Report each token's log-probability and that many of the likeliest alternatives."""

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.integer("max_tokens", 1, _INT_LIMIT)
        check.number("temperature", 0.0, 100.0)
        check.number("top_p", 0.0, 1.0, above=True)
        check.integer("top_k", 0, _INT_LIMIT)
        check.number("min_p", 0.0, 1.0)
        check.number("repetition_penalty", 0.0, 100.0, above=True)
        check.integer("repetition_window", 0, _INT_LIMIT)
        check.number("presence_penalty", -100.0, 100.0)
        check.number("frequency_penalty", -100.0, 100.0)
        if self.seed is not None:
            check.integer("seed", 0, _SEED_LIMIT - 1)
        if self.logprobs is not None:
            check.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        check_stops(self.stop)
        if self.logit_bias is not None:
            check.bias()
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, Collection):
            raise InvalidRequestError(f"stop_token_ids is {self.stop_token_ids!r}; allowed: a list of token ids")
        for id in self.stop_token_ids:
            check.token("stop_token_ids", id)

    @property
    def greedy(self) -> bool:
        """Whether the largest raw logit decides: no randomness and nothing that changes logits."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
        )

    def with_seed(self) -> SamplingParams:
        """The same with a seed drawn if there was none."""
        return self if self.seed is not None else replace(self, seed=int.from_bytes(os.urandom(8), "little") >> 1)


class _Checker:
    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def _fail(self, name: str, seen: object, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(f"{name} is {seen!r}; allowed: {allowed}")

    def integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self.params, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise self._fail(name, value, f"a whole number from {low}" + (f" to {high}" if high < _INT_LIMIT else ""))

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self.params, name)
        good = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (above and value == low):
            raise self._fail(name, value, f"a number {'above' if above else 'from'} {low:g} to {high:g}")

    def token(self, name: str, id: object) -> None:
        if isinstance(id, bool) or not isinstance(id, (int, np.integer)) or id < 0:
            raise self._fail(name, id, "token ids, whole numbers from 0")

    def bias(self) -> None:
        bias: Any = self.params.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIAS:
            raise self._fail("logit_bias", bias, f"a mapping of at most {MAX_BIAS} token ids to numbers")
        for id, value in bias.items():
            self.token("logit_bias", id)
            good = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
            if not good or not abs(value) <= _BIAS_LIMIT:
                raise self._fail(f"logit_bias[{id}]", value, f"a number from -{_BIAS_LIMIT:g} to {_BIAS_LIMIT:g}")


def make_params(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a request: what was given, else the checkpoint's ``defaults``, else the class's own."""
    known = {f.name for f in fields(SamplingParams)}
    for name in given:
        if name not in known:
            raise InvalidRequestError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
    return SamplingParams(**{**defaults, **{k: v for k, v in given.items() if v is not None}})


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a checkpoint's generation_config.json; greedy with `do_sample: false`, or without temperature."""
    found = {n: generation_config[n] for n in CHECKPOINT_DEFAULTS if generation_config.get(n) is not None}
    if generation_config.get("do_sample", "temperature" in found) is False:
        found["temperature"] = 0.0
    return found


def check_ids(params: SamplingParams, stop_ids: Sequence[int], vocab: int) -> None:
    """InvalidRequestError where ``stop_ids`` or the biases name a token that is never drawn, or are too many."""
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequestError(f"{len(stop_ids)} stop token ids; allowed are {MAX_STOP_IDS}")
    for id in (*stop_ids, *(params.logit_bias or ())):
        if id >= vocab:
            raise InvalidRequestError(f"token id {id} is outside of the vocabulary (0 to {vocab - 1})")


def fill_request(
    record: Any, bias_ids: Any, bias_values: Any, params: SamplingParams, *, vocab: int, stop_ids: Sequence[int]
) -> None:
    """Writes ``params`` into the device's Request record and bias lists (numpy views)."""
    assert params.seed is not None
    for name in _SAME_NAMES:
        record[name] = getattr(params, name)
    record["temperature"] = max(params.temperature, _LEAST_TEMPERATURE) if params.temperature else 0
    record["repetition_window"] = params.repetition_window if params.repetition_penalty != 1 else 0
    record["seed_low"], record["seed_high"] = params.seed & 0xFFFFFFFF, params.seed >> 32
    record["vocab"] = vocab
    record["top_logprobs"] = params.logprobs or 0
    record["stop_count"] = len(stop_ids)
    record["stop_ids"][: len(stop_ids)] = stop_ids
    bias = params.logit_bias or {}
    record["bias_count"] = len(bias)
    bias_ids[: len(bias)] = list(bias.keys())
    bias_values[: len(bias)] = list(bias.values())
