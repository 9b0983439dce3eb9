# SPDX-License-Identifier: Apache-2.0
"""Chats with the embedded model, which thinks and calls tools: their parts, whole, streamed, cut and remembered.

Constructed replies are in test_reply_text.py; what is reused from turn to turn in test_engine_sessions.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_harness import message_of, open_engine

from lily.engine import Engine
from lily.errors import InvalidRequestError
from lily.session import Session
from lily.streaming import Completion, ReplyChunks, StreamChunk, ToolCallDelta

NO_THINKING = {"enable_thinking": False}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 80}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine(None, max_context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def called(engine: Engine) -> Completion:
    """A reply with reasoning and one call."""
    reply = engine.chat(ASKED, tools=TOOLS, seed=1, **GREEDY)
    assert reply.reasoning
    assert [(one.name, one.arguments) for one in reply.tool_calls] == [("get_weather", '{"city": "Paris"}')]
    return reply


def test_a_call_ends_the_reply_and_leaves_no_tag_in_the_text(called: Completion) -> None:
    assert (called.text, called.finish_reason) == ("", "tool_calls")
    assert called.completion_tokens == len(called.token_ids) > 20


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("messages", [ASKED, HELLO], ids=["call", "text"])
def test_a_streamed_chat_equals_a_whole_one(engine: Engine, messages: list[dict[str, Any]], thinking: bool) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "template_kwargs": {"enable_thinking": thinking}, "seed": 5, **GREEDY}
    whole = engine.chat(messages, **how)
    chunks = list(engine.chat(messages, stream=True, **how))
    done = chunks[-1].completion
    assert done is not None
    for name in ("text", "reasoning", "tool_calls", "token_ids", "finish_reason", "seed"):
        assert getattr(done, name) == getattr(whole, name), name
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert "".join(chunk.reasoning for chunk in chunks) == (whole.reasoning or "")
    assert bool(whole.reasoning) == thinking
    arguments = "".join(delta.arguments for chunk in chunks for delta in chunk.tool_calls)
    assert arguments == "".join(one.arguments for one in whole.tool_calls)


def test_the_parts_of_a_chat_are_those_of_its_plain_text(engine: Engine, called: Completion) -> None:
    """The same tokens as a plain prompt have: the parts and the form make up the text."""
    prompt = engine.render_chat(ASKED, tools=TOOLS)
    plain = engine.generate(prompt, seed=1, **GREEDY)
    assert plain.token_ids == called.token_ids
    assert (plain.reasoning, plain.tool_calls, plain.finish_reason) == (None, [], "stop")
    parameter = "<parameter=city>\nParis\n</parameter>"
    form = f"<tool_call>\n<function=get_weather>\n{parameter}\n</function>\n</tool_call>"
    assert "".join(plain.text.split()) == "".join(f"{called.reasoning}</think>{form}".split())


def test_a_chat_cut_anywhere_has_no_call_that_is_not_complete(engine: Engine, called: Completion) -> None:
    end = engine.tokenizer.id_of("</tool_call>")
    for n in range(1, called.completion_tokens):
        done = engine.chat(ASKED, tools=TOOLS, temperature=0, max_tokens=n)
        assert (done.finish_reason, done.text) == ("length", "")
        assert [one.arguments for one in done.tool_calls] == ['{"city": "Paris"}'] * (end in done.token_ids)
        assert (called.reasoning or "").startswith((done.reasoning or "").rstrip("\n"))


def test_a_chat_takes_the_beginning_of_its_reply_and_tells_how_the_prompt_is_read(engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    how: dict[str, Any] = {**GREEDY, "on_prompt": lambda done, total: told.append((done, total))}
    answered = engine.chat(HELLO, continuation="I think so.\n</think>\n\nHello", **how)
    assert answered.reasoning is None
    assert not answered.text.startswith("Hello")
    assert told[-1] == (answered.prompt_tokens,) * 2
    thought = engine.chat(HELLO, continuation="I will", **GREEDY)
    assert thought.reasoning is not None
    assert thought.text


def test_stop_strings_are_not_looked_for_in_the_reasoning(engine: Engine) -> None:
    whole = engine.chat(HELLO, **GREEDY)
    assert whole.reasoning is not None
    word = next(word for word in whole.reasoning.split() if word not in whole.text)
    assert engine.chat(HELLO, stop=[word], **GREEDY).text == whole.text
    word = whole.text.split()[1]
    cut = engine.chat(HELLO, stop=[word], **GREEDY)
    assert (cut.text, cut.finish_reason, cut.reasoning) == (whole.text.split(word)[0], "stop", whole.reasoning)


def test_a_conversation_keeps_calls_and_goes_on_after_their_results(engine: Engine, called: Completion) -> None:
    session = engine.session()
    assert session.send(ASKED[0], tools=TOOLS, seed=1, **GREEDY).tool_calls[0].arguments == '{"city": "Paris"}'
    [kept] = session.messages[1:]
    assert kept["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (kept["content"], kept["reasoning_content"]) == ("", called.reasoning)
    result = {"role": "tool", "tool_call_id": kept["tool_calls"][0]["id"], "content": "12 degrees"}
    reply = session.send(result, tools=TOOLS, **GREEDY)
    assert "12" in reply.text
    assert session.messages[-1] == message_of(reply)
    assert reply.cached_tokens > called.prompt_tokens // 2
    json.dumps(session.messages)


def test_ids_of_calls_differ_between_turns_of_one_seed(engine: Engine) -> None:
    session = engine.session(template_kwargs=NO_THINKING)
    replies = [session.send(ASKED[0], tools=TOOLS, seed=1, **GREEDY) for _ in range(2)]
    ids = [one.id for reply in replies for one in reply.tool_calls]
    assert len(ids) == len(set(ids)) == 2


def test_tools_that_cannot_be_rendered_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="tools"):
        engine.chat(HELLO, tools=[3])  # type: ignore[list-item]


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}


@pytest.mark.parametrize(
    ("deltas", "ids"),
    [
        ([ToolCallDelta(0, "x", "f", '{"a": '), ToolCallDelta(0, arguments='"b"')], ""),
        ([ToolCallDelta(0, "x", "f", '{"a": '), ToolCallDelta(0, arguments='"b"}')], "x"),
        ([ToolCallDelta(0, "x", "f", '{"a": "b"}'), ToolCallDelta(1, "y", "f")], "x"),
        ([ToolCallDelta(0, "x", "f", '{"a": "b"}'), ToolCallDelta(1, "y", "f", '{"a": "b"}')], "xy"),
    ],
    ids=["open", "complete", "one of two", "two"],
)
def test_a_cancelled_reply_stays_as_far_as_it_came_with_the_calls_that_are_complete(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, deltas: list[ToolCallDelta], ids: str
) -> None:
    parts = [StreamChunk("", reasoning="Hm."), StreamChunk("I look.")]
    parts += [StreamChunk("", tool_calls=[delta]) for delta in deltas]

    def request(self: Engine, *_: Any) -> Callable[..., ReplyChunks]:
        return lambda control: (chunk for chunk in parts)

    monkeypatch.setattr(Engine, "request", request)
    session = Session(engine)
    for _ in session.stream("Hello!"):
        pass
    message = dict(session.messages[-1])
    got = message.pop("tool_calls", [])
    assert message == {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    assert got == [{"id": id, **CALL} for id in ids]
