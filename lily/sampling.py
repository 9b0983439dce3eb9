# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the sampler: checked values, defaults from the checkpoint, and their form on the device.

Order of operations, as mlx-lm's: logit bias, repetition penalty, presence and frequency penalties; then, on
probabilities at temperature 1, top-p, min-p, top-k; then the draw at the temperature.  The arithmetic is in the kernel
table (``sample_*``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypedDict

import numpy as np

from lily.errors import InvalidRequestError, show
from lily.kernels import MAX_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS

CHECKPOINT_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a checkpoint's generation_config.json may set."""

_SEED_LIMIT = 1 << 64
_INT_LIMIT = (1 << 31) - 1  # of the device's Request record
# Far beyond any logit, so that it forces or forbids a token; added in float32 it still leaves each logit within 5e-4.
_BIAS_LIMIT = 1e4
_LEAST_TEMPERATURE = 1e-6  # below it logits over temperature would leave float32; the draw is the greatest logit anyway
_SAME_NAMES = (
    "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Sampling(TypedDict, total=False):
    """The keyword arguments of a request: the fields of SamplingParams. None is the same as not given."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    repetition_window: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: Sequence[str] | str | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None


MAX_STOPS = 32
MAX_STOP_CHARS = 1024


def check_stops(stops: object) -> tuple[str, ...]:
    """The stop strings of a request, without repetitions. Raises InvalidRequestError for what cannot be matched."""
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, (list, tuple)):
        raise InvalidRequestError(f"stop must be a string or a list of strings, seen {type(stops).__name__}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequestError(f"stop[{index}] must be a string, seen {type(stop).__name__}")
        if not stop:
            raise InvalidRequestError(f"stop[{index}] is empty; a stop string needs at least one character")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop[{index}] has {len(stop):,} characters; at most {MAX_STOP_CHARS:,} allowed")
    unique = tuple(dict.fromkeys(stops))
    if len(unique) > MAX_STOPS:
        raise InvalidRequestError(f"{len(unique)} stop strings given; at most {MAX_STOPS} are allowed")
    return unique


@dataclass(frozen=True)
class SamplingParams:
    """How a reply is drawn and when it ends. Constructing it checks every value (InvalidRequestError).

    max_tokens: at most this many tokens; None: until the model ends the reply or the context is full.
    temperature: 0 to 100; 0 is greedy.
    top_p: keep the smallest set of most likely tokens whose probability reaches this; above 0 to 1, 1 is off.
    top_k: keep this many tokens; 0 is off.
    min_p: keep tokens at least this fraction as likely as the likeliest; 0 to 1, 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of the tokens among the last
        ``repetition_window`` of prompt and reply; above 0 to 100, 1 is off.
    repetition_window: tokens that ``repetition_penalty`` looks back.
    presence_penalty: subtracted from the logit of every token that the reply already has; -100 to 100, 0 is off.
    frequency_penalty: the same, once per occurrence in the reply.
    logit_bias: token id -> added to its logit, -10,000 to 10,000. From about 100 on it decides alone: the token is
        always, or never, drawn. At the ends logits are rounded to thousandths.
    seed: 0 to 2**64 - 1. Same seed, same prompt, same device: same reply. None draws one, which the result tells.
    stop: a string or strings that end the reply; they are not part of it. A string that is exactly one control
        token, ``<|im_end|>``, is taken as that token's id.
    stop_token_ids: ids that end the reply, beside the model's own end-of-sequence ids.
    ignore_eos: go on past the model's end-of-sequence ids (for benchmarks).
    logprobs: report each token's log-probability and that many (0 to 20) of the likeliest alternatives; None: none.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.optional("max_tokens", 1, _INT_LIMIT)
        check.number("temperature", 0.0, 100.0)
        check.number("top_p", 0.0, 1.0, above=True)
        check.integer("top_k", 0, _INT_LIMIT)
        check.number("min_p", 0.0, 1.0)
        check.number("repetition_penalty", 0.0, 100.0, above=True)
        check.integer("repetition_window", 0, _INT_LIMIT)
        check.number("presence_penalty", -100.0, 100.0)
        check.number("frequency_penalty", -100.0, 100.0)
        check.optional("seed", 0, _SEED_LIMIT - 1)
        check.optional("logprobs", 0, MAX_TOP_LOGPROBS)
        check_stops(self.stop)
        if self.logit_bias is not None:
            check.bias()
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, Collection):
            raise check.refused("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for id in self.stop_token_ids:
            check.token("stop_token_ids", id)

    def limit(self, room: int) -> int:
        """The most tokens of a reply for which the context has ``room``."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

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

    def refused(self, name: str, seen: object, allowed: str) -> InvalidRequestError:
        return InvalidRequestError(f"{name} is {show(seen)}; allowed: {allowed}")

    def integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self.params, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise self.refused(name, value, f"a whole number from {low} to {high}")

    def optional(self, name: str, low: int, high: int) -> None:
        if getattr(self.params, name) is not None:
            self.integer(name, low, high)

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self.params, name)
        # Comparing, unlike math.isfinite, takes whole numbers of any size; not-a-number is within no bounds.
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            raise self.refused(name, value, f"a number {'above' if above else 'from'} {low:g} to {high:g}")

    def token(self, name: str, id: object) -> None:
        if isinstance(id, bool) or not isinstance(id, (int, np.integer)) or id < 0:
            raise self.refused(name, id, "token ids, whole numbers from 0")

    def bias(self) -> None:
        bias: Any = self.params.logit_bias
        if not isinstance(bias, Mapping):
            raise self.refused("logit_bias", bias, "a mapping of token ids to numbers")
        if len(bias) > MAX_BIAS:
            raise InvalidRequestError(f"logit_bias has {len(bias)} entries; allowed: at most {MAX_BIAS}")
        for id, value in bias.items():
            self.token("logit_bias", id)
            if not _is_number(value) or not abs(value) <= _BIAS_LIMIT:
                allowed = f"a number from -{_BIAS_LIMIT:,.0f} to {_BIAS_LIMIT:,.0f} (100 already decides alone)"
                raise self.refused(f"logit_bias[{show(id)}]", value, allowed)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def make_params(
    defaults: Mapping[str, Any], given: Mapping[str, Any], params: SamplingParams | None = None
) -> SamplingParams:
    """SamplingParams of a request: what was given, else ``params``; without these the ``defaults``, else the class's.

    ``params`` says everything: of the checkpoint's ``defaults`` nothing is taken then.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling parameters of type {type(params).__name__}; allowed: a SamplingParams, or its fields by name"
        )
    known = [f.name for f in fields(SamplingParams)]
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise InvalidRequestError(f"unknown sampling parameter {show(name)}; {hint}")
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **chosen}) if params is None else replace(params, **chosen)


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a checkpoint's generation_config.json; greedy with ``do_sample: false``, or without temperature."""
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
    record["masked"] = 0
    record["stop_count"] = len(stop_ids)
    record["stop_ids"][: len(stop_ids)] = stop_ids
    bias = params.logit_bias or {}
    record["bias_count"] = len(bias)
    bias_ids[: len(bias)] = list(bias.keys())
    bias_values[: len(bias)] = list(bias.values())
