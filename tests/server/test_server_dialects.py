# SPDX-License-Identifier: Apache-2.0
"""The dialects as functions: what a body becomes, and what chunks of a reply become, calls and reasoning included.

Not handled: what is refused (test_server_errors.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lily.server.chat import ChatReply, read_chat
from lily.server.completions import CompletionReply, read_completion
from lily.server.counts import Head
from lily.server.outgoing import encoded
from lily.server.requests import Model, Request
from lily.streaming import Completion, StreamChunk, Timings, TokenLogprob, ToolCall, ToolCallDelta

MODEL = Model(frozenset({"enable_thinking", "preserve_thinking"}), 1000, {}, None)
HEAD = Head("id-1", 7, "tiny")
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TIMES = Timings(2.0, 4.0, 5.0, 0.75)


def token_bytes(id: int) -> bytes:
    return ["é".encode()[:1], "é".encode()[1:], b"a", b"b"][id]


def completion(text: str = "", reason: Any = "stop", **more: Any) -> Completion:
    return Completion(text, [1, 2, 3, 0], reason, 14, 4, 4, more.pop("logprobs", None), TIMES, 9, **more)


def end(done: Completion, **parts: Any) -> StreamChunk:
    return StreamChunk(parts.pop("text", ""), [0], None, done.finish_reason, done, **parts)


def replied(*chunks: StreamChunk, request: Request | None = None) -> list[dict[str, Any]]:
    reply = ChatReply(HEAD, request or Request({}, stream=True), token_bytes)
    return [*reply.begin(None), *(event for chunk in chunks for event in reply.push(chunk))]


def deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events for choice in event["choices"]]


# ---- replies
def test_reasoning_and_content_are_told_apart() -> None:
    got = replied(
        StreamChunk("", reasoning="Hm"), StreamChunk(""), StreamChunk("Yes", reasoning="."),
        end(completion("Yes!", reasoning="Hm."), text="!"),
    )  # fmt: skip
    assert deltas(got) == [
        {"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"reasoning_content": "."},
        {"content": "Yes"}, {"content": "!"}, {},
    ]  # fmt: skip
    assert [event["choices"][0]["finish_reason"] for event in got] == [None] * 5 + ["stop"]


def test_a_call_is_streamed_as_it_is_written() -> None:
    got = replied(
        StreamChunk("", tool_calls=[ToolCallDelta(0, "call_1", "look")]),
        StreamChunk("", tool_calls=[ToolCallDelta(0, arguments='{"at":')]),
        StreamChunk("", tool_calls=[ToolCallDelta(0, arguments=' "x"}'), ToolCallDelta(1, "call_2", "stop", "{}")]),
        end(completion("", "tool_calls")),
    )
    function = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert deltas(got)[1:] == [
        {"tool_calls": [function]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
        {"tool_calls": [
            {"index": 0, "function": {"arguments": ' "x"}'}},
            {"index": 1, "id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ]},
        {},
    ]  # fmt: skip
    assert got[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [("Hm", [], "Hm"), ("", [], ""), ("", [ToolCall("c", "look", "{}")], None), ("Hm", [ToolCall("c", "", "")], "Hm")],
    ids=["text", "nothing", "call", "both"],
)  # fmt: skip
def test_a_message_always_has_content(text: str, calls: list[ToolCall], content: str | None) -> None:
    done = completion(text, "tool_calls" if calls else "length", tool_calls=calls, reasoning="why")
    message = ChatReply(HEAD, Request({}), token_bytes).whole(done)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (content, "why")
    assert [call["function"] for call in message.get("tool_calls", [])] == [
        {"name": call.name, "arguments": call.arguments} for call in calls
    ]
    assert ("tool_calls" in message) == bool(calls)


def test_counts_and_times_are_in_the_last_object() -> None:
    counts = {
        "prompt_tokens": 14, "completion_tokens": 4, "total_tokens": 18, "prompt_tokens_details": {"cached_tokens": 4}
    }  # fmt: skip
    times = {
        "cache_n": 4, "cache_reason": "cold", "prompt_n": 10, "prompt_ms": 2000.0, "prompt_per_second": 5.0,
        "predicted_n": 4, "predicted_ms": 4000.0, "predicted_per_second": 0.75,
    }  # fmt: skip
    whole = ChatReply(HEAD, Request({}), token_bytes).whole(completion("a"))
    assert (whole["usage"], whole["timings"]) == (counts, times)
    *_, last = replied(StreamChunk("a"), end(completion("a")))
    assert last["timings"] == times
    assert "usage" not in last
    *before, finish, last = replied(end(completion("a")), request=Request({}, stream=True, usage=True))
    assert (last["choices"], last["usage"], last["timings"]) == ([], counts, times)
    assert all(event["usage"] is None and "timings" not in event for event in (*before, finish))


def test_log_probabilities_of_tokens_without_text_wait_for_the_next_event() -> None:
    first, second = TokenLogprob(0, -1.0, ((0, -1.0),)), TokenLogprob(1, -2.0)
    got = replied(StreamChunk("", [0], [first]), StreamChunk("é", [1], [second]), end(completion("é")))
    assert [choice["logprobs"] is None for event in got for choice in event["choices"]] == [True, False, True]
    assert got[1]["choices"][0]["logprobs"]["content"] == [
        {"token": "�", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": [
            {"token": "�", "logprob": -1.0, "bytes": [0xC3]}]},
        {"token": "�", "logprob": -2.0, "bytes": [0xA9], "top_logprobs": []},
    ]  # fmt: skip
    done = end(completion("é"))
    tail = replied(StreamChunk("", [0], [first]), done)[-1]
    assert len(tail["choices"][0]["logprobs"]["content"]) == 1


def test_offsets_of_a_streamed_completion_go_on() -> None:
    reply = CompletionReply(HEAD, Request({}, stream=True), token_bytes)
    chunks = [StreamChunk("a", [2], [TokenLogprob(2, -1.0, ((2, -1.0),))]), end(completion("ab"), text="b")]
    chunks[1] = StreamChunk("b", [3], [TokenLogprob(3, -2.0)], "stop", completion("ab"))
    first, last = (event["choices"][0] for chunk in chunks for event in reply.push(chunk))
    assert (first["text"], first["logprobs"]["text_offset"], first["finish_reason"]) == ("a", [0], None)
    assert first["logprobs"]["top_logprobs"] == [{"a": -1.0}]
    assert (last["text"], last["logprobs"]["text_offset"], last["finish_reason"]) == ("b", [1], "stop")


def test_an_event_is_one_line_whatever_the_text() -> None:
    data = encoded({"a": "x\n\r\u2028é"})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"a": "x\n\r\u2028é"}


def test_a_sign_of_life_is_a_comment_with_text() -> None:
    reply = ChatReply(HEAD, Request({}, stream=True), token_bytes)
    assert [*map(encoded, reply.alive(None))] == [b": waiting for the engine\n\n"]
    assert [*map(encoded, reply.alive((3, 9)))] == [b": 3 of 9 tokens of the prompt are read\n\n"]


# ---- requests
def test_the_smallest_request_leaves_everything_to_the_engine() -> None:
    got = read_chat({"messages": HI}, MODEL)
    assert got == Request({"ignore_eos": False}, messages=HI)
    plain = Request({"ignore_eos": False}, prompt=[1, 2], prompt_field="prompt")
    assert read_completion({"prompt": [1, 2]}, MODEL) == plain


def test_null_is_the_same_as_nothing_and_unknown_fields_are_ignored() -> None:
    names = (
        "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop", "temperature", "top_p", "logit_bias",
        "seed", "logprobs", "top_logprobs", "n", "tools", "tool_choice", "parallel_tool_calls", "response_format",
        "chat_template_kwargs", "reasoning_effort", "priority",
    )  # fmt: skip
    plain = read_chat({"messages": HI}, MODEL)
    assert read_chat({"messages": HI, **dict.fromkeys(names)}, MODEL) == plain
    assert read_chat({"messages": HI, "model": 3, "user": "me", "store": True, "metadata": {"a": 1}}, MODEL) == plain


@pytest.mark.parametrize(
    ("server", "asked", "want"),
    [(None, {}, None), (50, {}, 50), (50, {"max_tokens": 90}, 50), (50, {"max_tokens": 9}, 9),
     (None, {"max_tokens": 9, "max_completion_tokens": 7}, 7), (None, {"max_completion_tokens": 8}, 8)],
)  # fmt: skip
def test_the_least_limit_counts(server: int | None, asked: dict[str, int], want: int | None) -> None:
    model = Model(frozenset(), 9, {}, server)
    assert read_chat({"messages": HI, **asked}, model).sampling.get("max_tokens") == want


def test_no_limit_may_be_said_as_other_servers_have_it() -> None:
    got = [read_chat({"messages": HI, "top_k": given}, MODEL).sampling.get("top_k") for given in (-1, 0, 5, -2, None)]
    assert got == [0, 0, 5, -2, None]  # the engine refuses what is left below 0


def test_earlier_reasoning_is_kept_where_there_are_tools_and_the_template_can() -> None:
    def options(model: Model = MODEL, **fields: Any) -> Any:
        return read_chat({"messages": HI, **fields}, model).template_kwargs

    assert options() == {}
    assert options(tools=TOOLS) == {"preserve_thinking": True}
    assert options(tools=TOOLS, tool_choice="none") == {}
    assert options(tools=TOOLS, chat_template_kwargs={"preserve_thinking": False}) == {"preserve_thinking": False}
    assert options(Model(frozenset(), 9), tools=TOOLS, reasoning_effort="none") == {}


def test_options_of_the_server_stand_back_behind_those_of_the_request() -> None:
    model = Model(MODEL.template_options, 9, {"enable_thinking": False, "unknown": 1})

    def options(**fields: Any) -> Any:
        return read_chat({"messages": HI, **fields}, model).template_kwargs

    assert options() == {"enable_thinking": False}
    assert options(chat_template_kwargs={"enable_thinking": True}) == {"enable_thinking": True}


def test_only_a_last_reply_without_calls_is_continued() -> None:
    reply = {"role": "assistant", "content": "Yes"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert read_chat({"messages": [*HI, reply]}, MODEL).begun == reply
    assert read_chat({"messages": [*HI, reply, *HI]}, MODEL).begun is None
    assert read_chat({"messages": [*HI, call]}, MODEL).begun is None
