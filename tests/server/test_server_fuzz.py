# SPDX-License-Identifier: Apache-2.0
"""Bodies of every kind in every dialect, and whatever a model may write: answered or refused, never a failure.

A body is a legal one with a few values replaced or left out, a reply a drawn row of tags and texts; the same ones in
every run.
Not handled: bodies that are no JSON (test_server_errors.py); what a slip in a call comes to (test_reply_parts.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from answers import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, check_refusal, received
from asks import answers_alone, ask
from client_requests import CLAUDE_CODE, CODEX
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOOLS, writing
from server_harness import HI, Running, exchange, serving

from lily.engine import Engine

COUNTED, TEMPLATE, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/apply-template", "/tokenize", "/detokenize"
_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_CHAT = {
    "messages": [
        {"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "c"},
        {"role": "tool", "content": "d", "tool_call_id": "c"},
    ],
    "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "max_tokens": 3, "stream": False, "n": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}, "logprobs": True,
    "top_logprobs": 1, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low",
    "stream_options": {"include_usage": True}, "thinking_budget": 5, "priority": 1, "logit_bias": {"5": 1},
    "stop": ["x"], "temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "presence_penalty": 0.1,
}  # fmt: skip
_ITEMS = [
    {"type": "reasoning", "summary": [], "encrypted_content": "bGlseTE6SG0="},
    {"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "two"}]},
]  # fmt: skip
_BLOCKS = [
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "Bash", "input": {"cmd": "ls"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "b"}]},
        {"type": "document", "source": {"type": "text", "data": "c"}}]},
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    CHAT: _CHAT,
    COMPLETIONS: {
        "prompt": [1, 2], "max_tokens": 3, "stream": False, "n": 1, "best_of": 1, "echo": False, "suffix": "",
        "logprobs": 1, "stream_options": {"include_usage": True}, "seed": 1, "stop": "x", "logit_bias": {"5": 1},
    },
    RESPONSES: {
        **CODEX, "stream": False, "input": [*CODEX["input"], *_ITEMS], "max_output_tokens": 3, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"], "instructions": "a", "metadata": {"a": "b"},
        "text": {"format": {"type": "json_schema", "name": "it", "schema": _SCHEMA}}, "previous_response_id": None,
    },
    MESSAGES: {
        **CLAUDE_CODE, "stream": False, "messages": [*CLAUDE_CODE["messages"], *_BLOCKS], "max_tokens": 3,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["x"], "top_k": 5,
        "thinking": {"type": "enabled", "budget_tokens": 5}, "temperature": 1,
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    },
    COUNTED: {**CLAUDE_CODE, "messages": [*CLAUDE_CODE["messages"], *_BLOCKS]},
    TEMPLATE: _CHAT,
    TOKENIZE: {"content": "a", "messages": HI, "with_pieces": True},
    DETOKENIZE: {"tokens": [1, 2, 3]},
}  # fmt: skip

_WORDS = st.sampled_from(
    ["", "x", "user", "assistant", "text", "function", "message", "none", "\x00", "<think>", "é😀"]
)
_KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "arguments", "function", "schema", "$ref", "format"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
    | _WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
_GONE = object()


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where values lie in a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


@st.composite
def changed(draw: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The body, to be streamed or not, with up to four values replaced or left out."""
    body = deepcopy(body)
    if "stream" in body:
        body["stream"] = draw(st.booleans())
    for place in draw(st.lists(st.sampled_from(list(places(body))), min_size=1, max_size=4)):
        inner: Any = body
        try:
            for key in place[:-1]:
                inner = inner[key]
            value = draw(_VALUES | st.just(_GONE))
            if value is _GONE:
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
        except (KeyError, IndexError, TypeError):  # an earlier change has taken that place away
            continue
    return body


def check_answer(path: str, status: int, text: str) -> None:
    """A response that is right or a refusal."""
    if status != 200:
        assert status == 400, text
        check_refusal(path, text)
    elif text.startswith("{"):
        assert "error" not in json.loads(text) or path == RESPONSES
    else:
        assert '"server_error"' not in text
        assert '"api_error"' not in text
        assert "response.failed" not in text


@pytest.fixture(scope="module")
def brief(engine: Engine) -> Iterator[Running]:
    """A server whose replies are short, whatever is asked."""
    with serving(engine, max_tokens=3) as server:
        yield server


@pytest.fixture(scope="module")
def check_right(engine: Engine) -> Iterator[Callable[[], None]]:
    """Whether the engine answers as one does that was asked nothing else."""
    one = ask(6)
    [want] = answers_alone([one])
    with serving(engine) as server:

        def check() -> None:
            status, body = asyncio.run(exchange(server.port, one.path, one.body))
            assert (status, received(one.path, body, stream=one.stream)) == (200, want)

        yield check


def often(count: int, full: int) -> Any:
    return pytest.mark.parametrize("examples", [count, pytest.param(full, marks=pytest.mark.full)])


@often(100, 1500)
@pytest.mark.parametrize("path", BODIES)
def test_no_body_makes_a_failure(brief: Running, check_right: Any, path: str, examples: int) -> None:
    seen = set()

    @settings(max_examples=examples)
    @given(changed(BODIES[path]))
    def check(body: dict[str, Any]) -> None:
        response = brief.post(path, body)
        check_answer(path, response.status_code, response.text)
        seen.add(response.status_code)

    check()
    assert seen == {200, 400}
    check_right()


_TAGS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=look>", "<function=", "<function=other>", ">", "</function>",
    "<parameter=at>", "<parameter=times>", "<parameter=", "</parameter>", "<think>", "</think>", "\n", "2", '{"a": [',
    '"', "\\", "é😀", "a < b", " the cat", "</", "<",
])  # fmt: skip


@often(25, 800)
def test_nothing_that_a_model_writes_makes_a_failure(
    server: Running, engine: Engine, check_right: Any, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(st.lists(_TAGS, max_size=24), st.sampled_from(PATHS))
    def check(parts: list[str], path: str) -> None:
        answers = []
        with writing(engine, "".join(parts)):
            for stream in (False, True):
                response = server.post(path, {**_LEGAL[path], "stream": stream})
                assert response.status_code == 200, response.text
                answers.append(received(path, response.text, stream=stream))
        assert answers[0] == answers[1]

    check()
    check_right()


_FUNCTION = TOOLS[0]["function"]
_LEGAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "tools": TOOLS, "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "a", "stream_options": {"include_usage": True}},
    RESPONSES: {"input": HI, "tools": [{"type": "function", **_FUNCTION}]},
    MESSAGES: {
        "messages": HI, "max_tokens": 400, "thinking": {"type": "adaptive"},
        "tools": [{"name": _FUNCTION["name"], "input_schema": _FUNCTION["parameters"]}],
    },
}  # fmt: skip
