# SPDX-License-Identifier: Apache-2.0
"""``/v1/messages`` and ``/v1/messages/count_tokens``: what messages become, events, and the official client."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import anthropic
import pytest
from bodies import check_any_body, check_refusal
from client_requests import CLAUDE_CODE
from scripted import CALL, writing
from server_harness import HI, Running, gated, read_until, serving
from waiting import PATIENCE

from lily.engine import Engine
from lily.server.counts import Head
from lily.server.messages import MessagesReply, read_messages, read_to_count
from lily.server.requests import Model, Request
from lily.streaming import Completion, StreamChunk, Timings, ToolCall, ToolCallDelta

PATH = "/v1/messages"
MODEL = Model(frozenset({"enable_thinking", "preserve_thinking"}), 1000, {}, None)
LOOK: dict[str, Any] = {
    "name": "look", "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}},
}  # fmt: skip
OFF = {"enable_thinking": False}


def read(messages: Any = HI, **fields: Any) -> Request:
    return read_messages({"messages": messages, "max_tokens": 9, **fields}, MODEL)


# ---- what messages become
def test_system_is_text_or_blocks_without_the_one_that_changes() -> None:
    assert read(system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, *HI]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=8f3a1;"}
    blocks = [
        billing,
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    assert read(system=blocks).messages == [{"role": "system", "content": "a\n\nb"}, *HI]
    assert read(system=[billing]).messages == HI
    middle = read([*HI, {"role": "system", "content": "c"}, *HI]).messages
    assert [(m["role"], m["content"]) for m in middle] == [("user", "Hi"), ("user", "c"), ("user", "Hi")]


def test_results_of_tools_and_thinking_are_what_they_were() -> None:
    got = read([
        *HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "y"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
             "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]},
            {"type": "text", "text": "And"}, {"type": "text", "text": "now?"},
        ]},
    ], tools=[LOOK]).messages[1:]  # fmt: skip
    calls = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for id, arguments in (("c1", {"at": "x"}), ("c2", {}))
    ]
    assert got == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "t\nwo"},
        {"role": "user", "content": "And\nnow?"},
    ]


def test_thinking_is_off_unless_it_is_asked_for() -> None:
    assert read().template_kwargs == OFF
    assert read(thinking={"type": "disabled"}).template_kwargs == OFF
    assert read(thinking={"type": "adaptive"}).template_kwargs == {"enable_thinking": True}
    got = read(thinking={"type": "enabled", "budget_tokens": 2000}, tools=[LOOK])
    assert got.template_kwargs == {"enable_thinking": True, "preserve_thinking": True}
    assert got.demands.reasoning_tokens == 2000


def test_tools_of_the_provider_are_left_out() -> None:
    got = read(tools=[{"type": "web_search_20250305", "name": "web_search"}, {**LOOK, "type": "custom"}])
    function = {"name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]}
    assert got.tools == [{"type": "function", "function": function}]
    assert read(tools=[LOOK], tool_choice={"type": "none"}).tools is None


def test_what_clients_send_beside_it_is_accepted() -> None:
    fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "betas": ["x"],
        "container": "c",
        "output_config": {"effort": "high"},
        "anthropic_beta": ["y"],
    }
    assert read(**fields).sampling == {"ignore_eos": False, "max_tokens": 9}
    got = read(stop_sequences=["a", "b"], temperature=0.5, top_k=3, top_p=0.5).sampling
    assert got == {
        "ignore_eos": False,
        "max_tokens": 9,
        "stop": ["a", "b"],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
    }


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
     "messages[0].content[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
     "messages[0].content[0].source.type"),
    ({"messages": [{"role": "assistant", "content": "alone"}]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
     "messages[1].content[0].name"),
    ({"system": 3}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "at_fault"), WRONG, ids=str)
def test_what_is_wrong_is_named(fields: dict[str, Any], at_fault: str) -> None:
    check_refusal(lambda: read(**fields), at_fault)


def _read_more(reads: Any, body: dict[str, Any]) -> object:
    return reads({"messages": HI, "max_tokens": 3, **body}, MODEL)


def test_no_body_is_a_bug() -> None:
    fields = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences")
    keys = ("type", "role", "content", "text", "name", "input", "input_schema", "format", "source")
    words = ("user", "assistant", "text", "tool_use", "any")
    for reads in (read_messages, read_to_count):
        check_any_body(partial(_read_more, reads), fields, keys, words)


# ---- events
def completion(reason: Any = "stop", **more: Any) -> Completion:
    return Completion("", [1], reason, 14, 4, 4, None, Timings(2.0, 4.0, 5.0, 0.75), 9, **more)


def end(done: Completion) -> StreamChunk:
    return StreamChunk("", [0], None, done.finish_reason, done)


def test_blocks_come_one_after_the_other() -> None:
    reply = MessagesReply(Head("msg_ab", 7, "tiny"), Request({}, stream=True), lambda id: b"a")
    chunks = [
        StreamChunk("", reasoning="Hm."), StreamChunk("I "), StreamChunk("look."),
        StreamChunk("", tool_calls=[ToolCallDelta(0, "call_1", "look", '{"at"')]),
        StreamChunk("", tool_calls=[ToolCallDelta(0, arguments=': "x"}')]),
        end(completion("tool_calls", tool_calls=[ToolCall("call_1", "look", '{"at": "x"}')])),
    ]  # fmt: skip
    got = [*reply.begin((4, 14)), *(event for chunk in chunks for event in reply.push(chunk))]
    first, *blocks, delta, stop = got
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert (first["type"], first["message"]["usage"]) == ("message_start", {**usage, "output_tokens": 0})
    assert [(event["type"].removeprefix("content_block_"), event["index"]) for event in blocks] == [
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2),
    ]  # fmt: skip
    assert [event["delta"]["type"] for event in blocks if "delta" in event] == [
        "thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta", "input_json_delta",
    ]  # fmt: skip
    assert blocks[8]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    assert delta == {
        "type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {**usage, "output_tokens": 4},
    }  # fmt: skip
    assert stop == {"type": "message_stop"}
    whole = reply.whole(completion("tool_calls"))["content"]
    assert [block["type"] for block in whole] == ["thinking", "text", "tool_use"]
    assert (whole[0]["thinking"], whole[1]["text"], whole[2]["input"]) == ("Hm.", "I look.", {"at": "x"})
    assert whole[0]["signature"] == blocks[2]["delta"]["signature"]


def test_a_call_that_was_cut_off_is_in_no_message() -> None:
    reply = MessagesReply(Head("msg_ab", 7, "tiny"), Request({}), lambda id: b"a")
    for chunk in (StreamChunk("", tool_calls=[ToolCallDelta(0, "call_1", "look", '{"at"')]), end(completion("length"))):
        list(reply.push(chunk))
    got = reply.whole(completion("length"))
    assert (got["content"], got["stop_reason"]) == ([], "max_tokens")


# ---- the official client
@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def ask(client: Any, stream: bool = False, **how: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me of a cat."}]
    how = {"messages": messages, "max_tokens": 24, "extra_body": {"seed": 5}, **how}
    if not stream:
        return client.messages.create(model="any", **how)
    with client.messages.stream(model="any", **how) as events:
        return events.get_final_message()


def alike(a: Any, b: Any) -> bool:
    """Whether two messages say the same; what was cached may differ."""

    def essence(message: Any) -> Any:
        usage = message.usage
        counts = usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens
        blocks = [block.model_dump(exclude={"parsed_output"}) for block in message.content]
        return message.stop_reason, message.stop_sequence, blocks, counts

    return bool(essence(a) == essence(b))


@pytest.mark.parametrize("thinking", [False, True])
def test_a_message_is_the_engines_reply_streamed_and_whole(client: Any, engine: Engine, thinking: bool) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
    tell = partial(ask, client, max_tokens=60, extra_body={"seed": 5, "temperature": 1.0}, **asked)
    want = engine.chat(
        [{"role": "user", "content": "Tell me of a cat."}], template_kwargs={"enable_thinking": thinking},
        max_tokens=60, temperature=1.0, seed=5,
    )  # fmt: skip
    whole = tell()
    assert "".join(block.text for block in whole.content if block.type == "text") == want.text
    assert [block.thinking for block in whole.content if block.type == "thinking"] == [want.reasoning] * thinking
    assert whole.usage.output_tokens == want.completion_tokens
    assert whole.stop_reason == ("max_tokens" if want.finish_reason == "length" else "end_turn")
    assert alike(whole, tell(stream=True))


def test_a_tool_loop_with_thinking(client: Any, engine: Engine) -> None:
    how: dict[str, Any] = {
        "tools": [LOOK], "max_tokens": 400, "thinking": {"type": "adaptive"},
        "extra_body": {"ignore_eos": True, "seed": 1},
    }  # fmt: skip
    with writing(engine, "Hm.\n</think>\n\nI look up.\n\n" + CALL.format("the sky")):
        whole = ask(client, **how)
        assert alike(whole, ask(client, stream=True, **how))
    thinking, text, use = whole.content
    assert (thinking.thinking, text.text, use.name, use.input) == (
        "Hm.", "I look up.", "look", {"at": "the sky", "times": 2}
    )  # fmt: skip
    assert whole.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "blue"}
    messages = [
        {"role": "user", "content": "Tell me of a cat."},
        {
            "role": "assistant",
            "content": [block.model_dump(exclude={"parsed_output", "caller"}) for block in whole.content],
        },
        {"role": "user", "content": [result]},
    ]
    with writing(engine, "Blue.\n</think>\n\nIt is blue."):
        second = ask(client, **{**how, "messages": messages})
    assert second.content[-1].text == "It is blue."
    assert second.usage.cache_read_input_tokens > 0


def test_a_stop_sequence_is_named(client: Any, engine: Engine) -> None:
    text = ask(client, max_tokens=60).content[0].text
    word = text.split()[2]
    got = ask(client, max_tokens=60, stop_sequences=["\0never", word])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", word)
    assert got.content[0].text == text[: text.index(word)]
    assert alike(got, ask(client, max_tokens=60, stop_sequences=["\0never", word], stream=True))


def test_a_last_message_of_the_assistant_is_continued(client: Any, engine: Engine) -> None:
    messages = [{"role": "user", "content": "Tell me of a cat."}, {"role": "assistant", "content": "There was"}]
    got = ask(client, messages=messages)
    want = engine.chat(messages[:1], continuation="There was", template_kwargs=OFF, max_tokens=24, seed=5)
    assert got.content[0].text == want.text


@pytest.mark.parametrize("tools", [{}, {"tools": [LOOK]}])
def test_counted_tokens_are_those_that_are_read(client: Any, tools: Any) -> None:
    how = {"system": "Be brief.", "messages": [{"role": "user", "content": "Count zwölf ✓ me."}], **tools}
    counted = client.messages.count_tokens(model="any", **how).input_tokens
    usage = ask(client, **how).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_anthropics(client: Any, server: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1023 maximum") as error:
        ask(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        ask(client, messages=[{"role": "user", "content": "word " * 3000}], stream=True)
    refused = server.post(PATH, {"messages": HI}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in refused["error"]["message"]
    assert server.post(f"{PATH}/nowhere", {}).json()["error"]["type"] == "not_found_error"


def test_both_kinds_of_keys_are_taken_and_a_wrong_one_is_refused_in_the_dialect(engine: Engine) -> None:
    with serving(engine, key="right") as server:
        how: dict[str, Any] = {"base_url": server.url, "max_retries": 0, "timeout": PATIENCE}
        for key in ({"api_key": "right"}, {"auth_token": "right"}):
            with anthropic.Anthropic(**how, **key) as client:
                assert ask(client, max_tokens=2).content
        with anthropic.Anthropic(**how, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
            ask(client)


def test_a_ping_comes_while_the_engine_is_busy(engine: Engine) -> None:
    with (
        serving(engine, keep_alive=0.01) as server,
        gated() as gate,
        server.connect(f"{PATH}?beta=true", messages=HI, max_tokens=3) as connection,
    ):
        data = read_until(connection, b"ping")
        gate.open()
        data += read_until(connection, b"message_stop")
    named = [line.removeprefix("event: ") for line in data.decode().splitlines() if line.startswith("event: ")]
    assert named[0] == "ping"
    assert next(name for name in named if name != "ping") == "message_start"
    assert named[-1] == "message_stop"
    assert b"[DONE]" not in data


def test_what_claude_code_sends_is_taken(server: Running, engine: Engine) -> None:
    request = read_messages(CLAUDE_CODE, MODEL)
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "You write code.\n\n\nBe careful."),
        ("user", "<system-reminder>\nIt is Tuesday.\n</system-reminder>\n\nSay hello"),
        ("user", "Agents: none."),
    ]
    with writing(engine, "Hm.\n</think>\n\nHello."):
        text = server.post(f"{PATH}?beta=true", CLAUDE_CODE, headers={"anthropic-version": "2023-06-01"}).text
    assert text.rstrip().rpartition("data: ")[2] == '{"type":"message_stop"}'
    deltas = re.findall(r'"type":"text_delta","text":"([^"]*)"', text)
    assert "".join(deltas) == "Hello."
