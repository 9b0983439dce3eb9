# SPDX-License-Identifier: Apache-2.0
"""Replies that are held to demands: formats, calls, a bound on reasoning, whatever the model would rather write.

Biases make the model prefer what is illegal, and high temperatures anything.  Expected values: the demands themselves,
read by Python's own ``json`` and a small validator (json_schemas.py).
Not handled: what is refused (test_guide.py); masks in the kernels (sampling_tests.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from engine_device import Target
from engine_harness import TINY, open_engine
from json_schemas import obeys, random_schema

from lily.engine import Engine
from lily.streaming import Completion
from lily.text.guide import CLOSING

HELLO = [{"role": "user", "content": "Hello!"}]
QUIET = {"enable_thinking": False}
OBJECT = {"type": "json_object"}
ANY: dict[str, Any] = {"temperature": 3.0, "top_p": 1.0, "top_k": 0}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("look", {
            "type": "object",
            "properties": {
                "at": {"type": "string", "maxLength": 12}, "times": {"type": "integer", "minimum": 1, "maximum": 9},
                "how": {"enum": ["fast", "slow"]},
            },
            "required": ["at", "times"],
        }),
        ("stop", {"type": "object", "properties": {}}),
    )
]  # fmt: skip


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine(None, max_context=2048) as engine:
        yield engine


def id_of(engine: Engine, token: str) -> int:
    id = engine.tokenizer.id_of(token)
    assert id is not None
    return id


# ---- formats
def test_documents_of_random_schemas_are_never_illegal(engine: Engine) -> None:
    ended = 0
    for seed in range(24):
        schema = random_schema(random.Random(seed))
        how = {**ANY, "template_kwargs": QUIET, "max_tokens": 120, "seed": seed}
        reply = engine.chat(HELLO, response_format=form(schema), **how)
        if reply.finish_reason == "stop":
            ended += 1
            assert obeys(json.loads(reply.text), schema), (schema, reply.text)
        else:
            assert reply.completion_tokens == 120
    assert ended >= 12  # the others were cut


def test_a_json_object_begins_after_the_reasoning(engine: Engine) -> None:
    # The model prefers to end its reasoning at once, and never to write a brace.
    bias = {id_of(engine, "</think>"): 50.0, id_of(engine, "{"): -100.0}
    reply = engine.chat(HELLO, response_format=OBJECT, logit_bias=bias, temperature=0, max_tokens=60, seed=1)
    assert reply.reasoning is None
    assert reply.reasoning_tokens == 1
    assert reply.text.startswith("{")


@pytest.mark.parametrize("preferred", ["<|im_end|>", "</think>", "<tool_call>", "a"])
def test_a_token_that_is_illegal_is_not_drawn_however_likely(engine: Engine, preferred: str) -> None:
    how: dict[str, Any] = {"template_kwargs": QUIET, "max_tokens": 40, "seed": 3, "logprobs": 1}
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 2}
    for temperature in (0.0, 1.0):
        reply = engine.chat(
            HELLO, response_format=form(schema), logit_bias={id_of(engine, preferred): 9000.0},
            temperature=temperature, **how,
        )  # fmt: skip
        assert reply.finish_reason == "stop"
        assert obeys(json.loads(reply.text), schema)
        assert len(reply.logprobs or ()) == reply.completion_tokens
        assert all(entry.logprob <= 0 for entry in reply.logprobs or ())


def test_a_document_that_is_cut_off_says_so(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 50}
    reply = engine.chat(HELLO, response_format=form(schema), template_kwargs=QUIET, max_tokens=7, seed=1)
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 7)


def test_streamed_equals_whole_and_a_seed_gives_the_same_again(engine: Engine) -> None:
    schema = random_schema(random.Random(5))
    how: dict[str, Any] = {**ANY, "response_format": form(schema), "template_kwargs": QUIET, "max_tokens": 80}
    whole = engine.chat(HELLO, seed=11, **how)
    assert engine.chat(HELLO, seed=11, **how).token_ids == whole.token_ids
    assert engine.chat(HELLO, seed=12, **how).token_ids != whole.token_ids
    chunks = list(engine.chat(HELLO, seed=11, stream=True, **how))
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_a_stop_string_ends_a_document(engine: Engine) -> None:
    schema = {"const": "one, two, three"}
    reply = engine.chat(
        HELLO, response_format=form(schema), template_kwargs=QUIET, stop=", three", max_tokens=40, seed=1
    )
    assert (reply.text, reply.finish_reason, reply.stop) == ('"one, two', "stop", ", three")


def test_a_reply_without_demands_has_the_bits_of_before_one_with_them(engine: Engine) -> None:
    how: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 4}
    before = engine.chat(HELLO, **how)
    engine.chat(HELLO, response_format=OBJECT, **how)
    assert engine.chat(HELLO, **how).token_ids == before.token_ids


@pytest.mark.parametrize("count", range(1, 12, 2))
def test_a_reply_that_is_cancelled_leaves_the_sequence_as_a_cold_run_has_it(engine: Engine, count: int) -> None:
    stream = engine.chat(HELLO, response_format=OBJECT, template_kwargs=QUIET, seed=2, max_tokens=40, stream=True)
    for _, _chunk in zip(range(count), stream, strict=False):
        pass
    stream.close()
    again = engine.chat(HELLO, response_format=OBJECT, template_kwargs=QUIET, seed=2, max_tokens=12)
    with open_engine(None, max_context=2048) as cold:
        fresh = cold.chat(HELLO, response_format=OBJECT, template_kwargs=QUIET, seed=2, max_tokens=12)
    assert fresh.token_ids == again.token_ids


# ---- calls
def checked_calls(reply: Completion) -> list[str]:
    """Names of a reply's calls, whose arguments are held to the tools' schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for call in reply.tool_calls:
        assert obeys(json.loads(call.arguments), schemas[call.name]), call
    return [call.name for call in reply.tool_calls]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_required_call_is_always_a_valid_call(engine: Engine, thinking: bool) -> None:
    bias = {id_of(engine, "</think>"): 20.0, id_of(engine, "<|im_end|>"): 20.0}
    for seed in range(8):
        reply = engine.chat(
            HELLO, tools=TOOLS, tool_choice="required", template_kwargs={"enable_thinking": thinking}, logit_bias=bias,
            seed=seed, max_tokens=200, **ANY,
        )  # fmt: skip
        assert reply.finish_reason == "tool_calls"
        assert checked_calls(reply)
        assert reply.text == ""


@pytest.mark.parametrize("name", ["look", "stop"])
def test_a_named_call_is_one_of_that_function(engine: Engine, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    how = {**ANY, "template_kwargs": QUIET, "max_tokens": 120, "parallel_tool_calls": False}
    for seed in range(4):
        reply = engine.chat(HELLO, tools=TOOLS, tool_choice=choice, seed=seed, **how)
        assert checked_calls(reply) == [name]
        assert reply.finish_reason == "tool_calls"


def test_several_calls_come_only_where_they_may(engine: Engine) -> None:
    newline = {engine.tokenizer.encode("\n")[0]: 200.0}  # after a call it is what begins the next one
    choice = {"type": "function", "function": {"name": "stop"}}
    for parallel, expected in ((True, 3), (False, 1)):
        reply = engine.chat(
            HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, logit_bias=newline,
            template_kwargs=QUIET, temperature=0, seed=1, max_tokens=60,
        )  # fmt: skip
        assert min(len(reply.tool_calls), 3) == expected


# ---- reasoning
@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("held", [{}, {"response_format": OBJECT}])
def test_a_budget_ends_the_reasoning_after_exactly_so_many_tokens(
    engine: Engine, budget: int, held: dict[str, Any]
) -> None:
    never = {id_of(engine, "</think>"): -100.0}
    reply = engine.chat(HELLO, reasoning_budget=budget, logit_bias=never, temperature=0, seed=1, max_tokens=90, **held)
    closing = engine.tokenizer.encode(CLOSING + "</think>")
    assert reply.token_ids[budget : budget + len(closing)] == closing
    assert reply.reasoning_tokens == budget + len(closing)
    assert (reply.reasoning or "").endswith(CLOSING.strip())
    assert reply.text
    if held:
        assert reply.text.startswith("{")


def test_reasoning_that_ends_within_its_budget_is_left_alone(engine: Engine) -> None:
    how: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 120}
    free = engine.chat(HELLO, **how)
    assert free.reasoning_tokens < free.completion_tokens
    assert engine.chat(HELLO, reasoning_budget=free.reasoning_tokens, **how).token_ids == free.token_ids
    assert engine.chat(HELLO, reasoning_budget=free.reasoning_tokens - 1, **how).token_ids != free.token_ids


# ---- devices
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_device_holds_to_a_mask(device: Target, temperature: float) -> None:
    """Random weights write no document by themselves."""
    how: dict[str, Any] = {"template_kwargs": QUIET, "temperature": temperature, "max_tokens": 12, "logprobs": 0}
    with open_engine(TINY) as engine:
        reply = engine.chat(HELLO, response_format=form({"const": 42}), seed=1, **how)
    assert (reply.text, reply.finish_reason) == ("42", "stop")
    assert len(reply.logprobs or ()) == reply.completion_tokens
