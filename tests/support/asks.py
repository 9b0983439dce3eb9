# SPDX-License-Identifier: Apache-2.0
"""Requests that differ in everything, in each dialect, beside what the engine answers if it is asked directly.

Every draw comes from the number of the request: the same number is the same request everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from answers import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, Answer
from scripted import TOOLS
from server_harness import open_tiny

from lily.engine import Engine

WORDS = (
    "the", "cat", "a", "bird", "sees", "looks", "at", "under", "tree", "house", "and", "little", "red", "sun", "of",
)  # fmt: skip
_HOW: list[dict[str, Any]] = [
    {}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"logit_bias": {300: 4.0}},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"stop": [" a", "e."]},
]  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """``alone``: the answer of an engine."""

    path: str
    body: dict[str, Any]
    alone: Callable[[Engine], Answer]

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


def ask(number: int) -> Ask:
    """Request ``number``: dialects in turn, four of each way to send, every fifth one with a call that is forced."""
    draw = random.Random(number)
    path, stream, forced = PATHS[number % 4], number // 4 % 2 == 1, number % 5 == 4
    text = " ".join(draw.choices(WORDS, k=draw.choice((2, 9, 60, 300))))
    system = " ".join(WORDS[2:] * draw.choice((1, 24)))  # a long one is a beginning that many share
    sampling = {
        "seed": number, "max_tokens": draw.randint(4, 40), "temperature": draw.choice((0, 0.7, 1.5, 3.0)),
        **draw.choice(_HOW),
    }  # fmt: skip
    if path == COMPLETIONS:
        return _of_completions(text, sampling, stream)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return _MAKE[path](messages, sampling, stream, draw.random() < 0.5, forced)


def answers_alone(asks: Iterable[Ask]) -> list[Answer]:
    """What an engine answers that knows nothing of the others."""
    found = []
    with open_tiny(sequences=1) as engine:
        for one in asks:
            for resident in engine._residents._all:
                resident.sequence.reset()
            found.append(one.alone(engine))
    return found


def _sent(sampling: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    bias = {str(id): value for id, value in sampling.get("logit_bias", {}).items()}
    return {**sampling, **({"logit_bias": bias} if bias else {})}


def _of_completions(text: str, sampling: dict[str, Any], stream: bool) -> Ask:
    body = {"prompt": text, "logprobs": 0, "stream": stream, "stream_options": {"include_usage": True}}
    return Ask(
        COMPLETIONS, {**body, **_sent(sampling)},
        lambda engine: Answer.of(engine.generate(text, logprobs=0, **sampling)),
    )  # fmt: skip


def _alone(messages: list[Any], sampling: dict[str, Any], thinks: bool, forced: bool) -> Callable[[Engine], Any]:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"} if forced else {}
    return lambda engine: engine.chat(messages, template_kwargs={"enable_thinking": thinks}, **how, **sampling)


def _of_chat(messages: list[Any], sampling: dict[str, Any], stream: bool, thinks: bool, forced: bool) -> Ask:
    alone = _alone(messages, {**sampling, "logprobs": 0}, thinks, forced)
    body = {
        "messages": messages, "stream": stream, "stream_options": {"include_usage": True}, "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": thinks}, **_sent(sampling),
    }  # fmt: skip
    body |= {"tools": TOOLS, "tool_choice": "required"} if forced else {}
    return Ask(CHAT, body, lambda engine: Answer.of(alone(engine)))


def _of_responses(messages: list[Any], sampling: dict[str, Any], stream: bool, thinks: bool, forced: bool) -> Ask:
    alone = _alone(messages, sampling, thinks, forced)
    body = {"input": messages, "stream": stream, **_sent(sampling)}
    body["max_output_tokens"] = body.pop("max_tokens")
    body |= {} if thinks else {"reasoning": {"effort": "none"}}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body |= {"tools": tools, "tool_choice": "required"} if forced else {}
    return Ask(RESPONSES, body, lambda engine: Answer.of(alone(engine)))


def _of_messages(messages: list[Any], sampling: dict[str, Any], stream: bool, thinks: bool, forced: bool) -> Ask:
    alone = _alone(messages, sampling, thinks, forced)
    system, *rest = messages
    body = {"system": system["content"], "messages": rest, "stream": stream, **_sent(sampling)}
    body |= {"thinking": {"type": "adaptive"}} if thinks else {}
    body |= {"stop_sequences": body.pop("stop")} if "stop" in body else {}
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    body |= {"tools": tools, "tool_choice": {"type": "any"}} if forced else {}
    return Ask(MESSAGES, body, lambda engine: Answer.of(alone(engine)))


_MAKE = {CHAT: _of_chat, RESPONSES: _of_responses, MESSAGES: _of_messages}
