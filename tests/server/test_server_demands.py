# SPDX-License-Identifier: Apache-2.0
"""Formats, forced calls and budgets over HTTP, in each dialect, with the official client.

Not handled: every schema and demand (test_guide.py, test_engine_demands.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import TOOLS
from server_harness import HI, Running

from lily.server.requests import Request, branches
from lily.text.guide import CLOSING

SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
CHOICE = {"type": "function", "function": {"name": "look"}}


def ask(server: Running, **how: Any) -> Any:
    how = {"extra_body": QUIET, "max_tokens": 300, "seed": 1, "temperature": 0, **how}
    return server.openai.chat.completions.create(model="any", messages=HI, **how)  # type: ignore[arg-type]


def fits(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["n"] and type(value["n"]) is int and 1 <= value["n"] <= 9


def test_a_format_is_kept_streamed_and_whole(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    choice = ask(server, response_format=form).choices[0]
    assert fits(choice.message.content)
    assert choice.finish_reason == "stop"
    chunks = list(ask(server, response_format=form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content


def test_a_document_that_is_cut_has_that_reason(server: Running) -> None:
    choice = ask(server, response_format={"type": "json_object"}, max_tokens=2).choices[0]
    assert (choice.finish_reason, choice.message.content[0]) == ("length", "{")


@pytest.mark.parametrize("tool_choice", ["required", CHOICE], ids=str)
def test_a_forced_call_is_a_call(server: Running, tool_choice: Any) -> None:
    choice = ask(server, tools=TOOLS, tool_choice=tool_choice, temperature=2, parallel_tool_calls=False).choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("look", "tool_calls", None)
    arguments = json.loads(call.function.arguments)
    assert all(type(arguments.get(name, kind())) is kind for name, kind in (("at", str), ("times", int)))


@pytest.mark.parametrize("name", ["reasoning_budget", "thinking_budget"])
def test_a_budget_ends_the_reasoning(server: Running, name: str) -> None:
    message = ask(server, extra_body={name: 3}).choices[0].message
    assert message.model_extra["reasoning_content"].endswith(CLOSING.strip())
    assert message.content


def test_the_other_dialects_hold_to_a_format_too(server: Running) -> None:
    body = {"input": "Hi", "max_output_tokens": 300, "temperature": 0, "reasoning": {"effort": "none"}}
    form = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    output = server.post("/v1/responses", {**body, "text": form}).json()["output"]
    assert fits(output[-1]["content"][0]["text"])
    body = {"messages": HI, "max_tokens": 300, "temperature": 0}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    content = server.post("/v1/messages", {**body, "output_config": config}).json()["content"]
    assert fits(content[-1]["text"])


def test_the_other_dialects_force_a_call_too(server: Running) -> None:
    function = TOOLS[0]["function"]
    body = {"input": "Hi", "max_output_tokens": 300, "temperature": 0, "reasoning": {"effort": "none"}}
    tools = [{"type": "function", **function}]
    output = server.post("/v1/responses", {**body, "tools": tools, "tool_choice": "required"}).json()["output"]
    assert [(item["type"], item["name"]) for item in output][:1] == [("function_call", "look")]
    body = {"messages": HI, "max_tokens": 300, "temperature": 0}
    tools = [{"name": "look", "input_schema": function["parameters"]}]
    content = server.post("/v1/messages", {**body, "tools": tools, "tool_choice": {"type": "any"}}).json()["content"]
    assert [(block["type"], block["name"]) for block in content][:1] == [("tool_use", "look")]


def test_a_schema_that_cannot_be_used_is_refused_before_the_reply(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    response = server.chat(response_format=form, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


# ---- several replies
def test_several_replies_are_those_of_seeds_that_follow_each_other(server: Running) -> None:
    how = {"temperature": 3, "top_p": 1, "max_tokens": 12, "extra_body": {**QUIET, "top_k": 0}}
    alone = [ask(server, seed=seed, **how) for seed in (7, 8, 9)]
    texts = [one.choices[0].message.content for one in alone]
    together = ask(server, seed=7, n=3, **how)
    assert [(choice.index, choice.message.content) for choice in together.choices] == list(enumerate(texts))
    assert len(set(texts)) > 1
    assert together.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    chunks = list(ask(server, seed=7, n=3, stream=True, stream_options={"include_usage": True}, **how))
    streamed = ["", "", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert [c.index for chunk in chunks for c in chunk.choices if c.finish_reason] == [0, 1, 2]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == together.usage.completion_tokens


def test_several_completions_have_offsets_of_their_own(server: Running) -> None:
    how: dict[str, Any] = {"prompt": "Once", "model": "any", "max_tokens": 5, "seed": 2, "logprobs": 0}
    alone = [server.openai.completions.create(**{**how, "seed": seed}).choices[0] for seed in (2, 3)]
    both = server.openai.completions.create(n=2, **how).choices
    assert [(c.text, c.logprobs.text_offset) for c in both] == [(c.text, c.logprobs.text_offset) for c in alone]
    streamed = list(server.openai.completions.create(n=2, stream=True, **how))
    for index in (0, 1):
        parts = [c for chunk in streamed for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in parts) == alone[index].text
        assert [n for c in parts if c.logprobs for n in c.logprobs.text_offset] == alone[index].logprobs.text_offset


def test_seeds_of_several_replies_follow_each_other_and_are_drawn_where_there_is_none() -> None:
    most = (1 << 64) - 1
    for seed, expected in ((3, [3, 4, 5]), (most, [most, 0, 1]), (None, [None] * 3)):
        made = branches(Request({"seed": seed, "stop": "x"}, replies=3))
        assert [(one.sampling, one.replies) for one in made] == [({"seed": n, "stop": "x"}, 1) for n in expected]
