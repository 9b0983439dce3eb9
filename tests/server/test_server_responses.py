# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``: what input becomes, events in their order, and the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from bodies import check_any_body, check_refusal
from client_requests import CODEX
from scripted import CALL, writing
from server_harness import HI, Running, gated, read_until, serving

from lily.engine import Engine
from lily.server.counts import Head
from lily.server.requests import Model, Request
from lily.server.responses import ResponsesReply, read_responses, unwrapped, wrapped
from lily.streaming import Completion, StreamChunk, Timings, ToolCall, ToolCallDelta

PATH = "/v1/responses"
MODEL = Model(frozenset({"enable_thinking", "preserve_thinking"}), 1000, {}, None)
LOOK: dict[str, Any] = {
    "type": "function", "name": "look", "description": "Looks.", "strict": False,
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}},
}  # fmt: skip


def read(input: Any = "Hi", **fields: Any) -> Request:
    return read_responses({"input": input, **fields}, MODEL)


def said(*parts: Any) -> list[dict[str, Any]]:
    """Messages without what the conversation is begun with."""
    return [dict(message) for message in read([{"role": "user", "content": "Hi"}, *parts, _ASK]).messages][1:-1]


_ASK = {"role": "user", "content": [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "now?"}]}


# ---- what input becomes
def test_a_string_is_a_message_and_instructions_come_first() -> None:
    assert read().messages == HI
    got = read([{"role": "developer", "content": "b"}, *HI], instructions="a").messages
    assert got == [{"role": "system", "content": "a\n\nb"}, *HI]
    late = read([*HI, {"type": "message", "role": "system", "content": "c"}, *HI], instructions="a").messages
    assert [m["role"] for m in late] == ["system", "user", "user", "user"]


def test_what_the_model_has_made_is_one_message_until_somebody_else_speaks() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}'}
    got = said(
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": wrapped("Hm.")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call, {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
        {"role": "assistant", "content": "Done."},
    )  # fmt: skip
    function = {"name": "look", "arguments": {"at": "x"}}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert got == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "Well."},
    ]


def test_reasoning_survives_in_what_clients_take_for_encrypted() -> None:
    for text in ("Hm.", "", "zwölf ✓\n"):
        assert unwrapped(wrapped(text)) == text
    for foreign in ("", "gAAAAAB", "not base64!", "bGlseTE=", "/w==", "é"):
        assert unwrapped(foreign) == ""
    assert said({"type": "reasoning", "encrypted_content": "gAAAAAB"}) == []


def test_other_tools_than_functions_are_left_out() -> None:
    got = read(
        tools=[{"type": "web_search"}, LOOK, {"type": "namespace", "tools": []}, {"type": "custom", "name": "x"}]
    )
    function = {name: LOOK[name] for name in ("name", "description", "parameters")}
    assert got.tools == [{"type": "function", "function": function}]
    assert got.template_kwargs == {"preserve_thinking": True}
    assert read(tools=[{"type": "web_search"}]).tools is None
    assert read(tools=[LOOK], tool_choice="none").tools is None
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    assert read(tools=[LOOK, {**LOOK, "name": "other"}], tool_choice=some).tools == got.tools


def test_effort_none_switches_reasoning_off() -> None:
    assert read(reasoning={"effort": "none"}).template_kwargs == {"enable_thinking": False}
    assert read(reasoning={"effort": "high", "summary": "auto"}).template_kwargs == {}


def test_what_clients_send_beside_it_is_accepted() -> None:
    fields = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "truncation": "auto",
        "user": "u",
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
        "safety_identifier": "s",
        "text": {"verbosity": "low"},
        "max_tool_calls": 3,
        "client_metadata": {"x": "y"},
    }
    assert read(**fields).sampling == {"ignore_eos": False}
    assert read(max_output_tokens=7, temperature=0.5).sampling == {
        "ignore_eos": False, "max_tokens": 7, "temperature": 0.5
    }  # fmt: skip


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
    ({"input": [{"role": "assistant", "content": "alone"}]}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"instructions": 3}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**LOOK, "parameters": 3}]}, "tools[0].parameters"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "at_fault"), WRONG, ids=str)
def test_what_is_wrong_is_named(fields: dict[str, Any], at_fault: str) -> None:
    check_refusal(lambda: read(**fields), at_fault)


def test_no_body_is_a_bug() -> None:
    fields = ("input", "tools", "tool_choice", "text", "reasoning", "include", "instructions", "metadata")
    keys = ("type", "role", "content", "text", "name", "arguments", "output", "function", "format")
    words = ("user", "function", "message", "input_text", "x")
    check_any_body(lambda body: read_responses({"input": "Hi", **body}, MODEL), fields, keys, words)


# ---- events
def completion(reason: Any = "stop", **more: Any) -> Completion:
    return Completion("", [1], reason, 14, 4, 4, None, Timings(2.0, 4.0, 5.0, 0.75), 9, reasoning_tokens=2, **more)


def events(*chunks: StreamChunk) -> list[dict[str, Any]]:
    reply = ResponsesReply(Head("resp_ab", 7, "tiny"), Request({}, stream=True), lambda id: b"a")
    return [*reply.begin((4, 14)), *(event for chunk in chunks for event in reply.push(chunk))]  # type: ignore[misc]


def end(done: Completion) -> StreamChunk:
    return StreamChunk("", [0], None, done.finish_reason, done)


def kinds(got: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in got]


def test_each_part_begins_grows_and_ends_before_the_next() -> None:
    call = ToolCall("call_1", "look", '{"at": "x"}')
    got = events(
        StreamChunk("", reasoning="Hm"), StreamChunk("", reasoning="."), StreamChunk("I "), StreamChunk("look."),
        StreamChunk("", tool_calls=[ToolCallDelta(0, "call_1", "look", '{"at"')]),
        StreamChunk("", tool_calls=[ToolCallDelta(0, arguments=': "x"}')]), StreamChunk("So."),
        end(completion("tool_calls", tool_calls=[call])),
    )  # fmt: skip
    part = ["content_part.done", "output_item.done"]
    assert kinds(got) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done", *part,
        "output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done", *part,
        "output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", *part,
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    done = [event["item"] for event in got if event["type"] == "response.output_item.done"]
    assert done == got[-1]["response"]["output"]
    reasoning, message, function, again = done
    assert (reasoning["content"][0]["text"], unwrapped(reasoning["encrypted_content"])) == ("Hm.", "Hm.")
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "I look.")
    assert (function["call_id"], function["name"], function["arguments"]) == ("call_1", "look", '{"at": "x"}')
    assert again["content"][0]["text"] == "So."
    assert len({item["id"] for item in done}) == 4
    places = [event["output_index"] for event in got if "output_index" in event]
    assert (places, set(places)) == (sorted(places), {0, 1, 2, 3})
    assert got[-1]["response"]["usage"] == {
        "input_tokens": 14, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 18,
    }  # fmt: skip


def test_a_call_that_was_cut_off_is_never_done() -> None:
    got = events(StreamChunk("", tool_calls=[ToolCallDelta(0, "call_1", "look", '{"at"')]), end(completion("length")))
    assert kinds(got)[2:] == ["output_item.added", "function_call_arguments.delta", "incomplete"]
    response = got[-1]["response"]
    assert (response["status"], response["output"]) == ("incomplete", [])
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_sign_of_life_is_an_event() -> None:
    reply = ResponsesReply(Head("resp_ab", 7, "tiny"), Request({}, stream=True), lambda id: b"a")
    assert kinds(list(reply.alive(None))) == ["created", "in_progress"]  # type: ignore[arg-type]
    assert kinds(list(reply.alive((3, 9)))) == ["in_progress"]  # type: ignore[arg-type]
    assert list(reply.begin((9, 9))) == []


# ---- the official client
def ask(server: Running, **how: Any) -> Any:
    how = {"input": "Tell me of a cat.", "max_output_tokens": 24, "extra_body": {"seed": 5}, **how}
    return server.openai.responses.create(model="any", **how)


def streamed(server: Running, **how: Any) -> tuple[list[Any], Any]:
    got = list(ask(server, stream=True, **how))
    assert [event.sequence_number for event in got] == list(range(len(got)))
    return got, got[-1].response


def alike(a: Any, b: Any) -> bool:
    """Whether two responses say the same; each has ids of its own."""

    def essence(response: Any) -> Any:
        items = [{k: v for k, v in item.model_dump().items() if k != "id"} for item in response.output]
        usage = response.usage.model_dump()
        usage.pop("input_tokens_details")
        return response.status, response.output_text, items, usage

    return bool(essence(a) == essence(b))


@pytest.mark.parametrize("seed", range(3))
def test_a_response_is_the_engines_reply_streamed_and_whole(server: Running, engine: Engine, seed: int) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": seed}}
    want = engine.chat([{"role": "user", "content": "Tell me of a cat."}], max_tokens=24, temperature=1.0, seed=seed)
    whole = ask(server, **how)
    got, last = streamed(server, **how)
    assert whole.output_text == want.text
    assert whole.usage.output_tokens == want.completion_tokens
    assert whole.status == ("incomplete" if want.finish_reason == "length" else "completed")
    assert alike(whole, last)
    assert "".join(event.delta for event in got if event.type == "response.output_text.delta") == want.text


def test_a_tool_loop_with_reasoning(server: Running, engine: Engine) -> None:
    with writing(engine, "Hm.\n</think>\n\nI look up.\n\n" + CALL.format("the sky")):
        how: dict[str, Any] = {
            "tools": [LOOK],
            "max_output_tokens": 400,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "extra_body": {"ignore_eos": True, "seed": 1},
        }
        whole = ask(server, **how)
        _, last = streamed(server, **how)
    assert alike(whole, last)
    reasoning, message, call = whole.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert json.loads(call.arguments) == {"at": "the sky", "times": 2}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    # As Codex does it: the reasoning goes back as encrypted content alone.
    kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    items = [{"role": "user", "content": "Tell me of a cat."}, kept, message.model_dump(), call.model_dump(), output]
    with writing(engine, "Blue.\n</think>\n\nIt is blue."):
        second = ask(server, **{**how, "input": items})
    assert second.output_text == "It is blue."
    prompt = engine.render_chat(read_responses({"input": items, "tools": [LOOK]}, MODEL).messages,
                                tools=read(tools=[LOOK]).tools)  # fmt: skip
    assert "Hm." in engine.tokenizer.decode(prompt)
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_log_probabilities_of_the_text(server: Running, engine: Engine) -> None:
    got = ask(server, include=["message.output_text.logprobs"], top_logprobs=2, reasoning={"effort": "none"})
    logprobs = got.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == got.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_what_was_asked_is_repeated(server: Running) -> None:
    got = ask(server, metadata={"a": "b"}, instructions="Be brief.", temperature=0.0, tools=[LOOK], tool_choice="none")
    assert (got.object, got.model, got.metadata, got.instructions) == ("response", "tiny", {"a": "b"}, "Be brief.")
    assert (got.tool_choice, got.tools[0].name, got.store, got.error) == ("none", "look", False, None)


def test_errors_are_openais(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as error:
        ask(server, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="tokens") as error:
        ask(server, input="word " * 3000)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")


def test_a_stream_says_that_the_prompt_is_too_long_by_an_event(server: Running) -> None:
    *_, last = ask(server, input="word " * 3000, stream=True)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "context_length_exceeded")


def test_signs_of_life_are_events_too(engine: Engine) -> None:
    with (
        serving(engine, keep_alive=0.01) as server,
        gated() as gate,
        server.connect(PATH, input="Hi", max_output_tokens=3) as connection,
    ):
        data = read_until(connection, b'"sequence_number":2')
        gate.open()
        data += read_until(connection, b'"usage":{')
    named = [line for line in data.decode().splitlines() if line.startswith("event: ")]
    assert named[:3] == ["event: response.created", *["event: response.in_progress"] * 2]
    assert named[-1] in ("event: response.completed", "event: response.incomplete")
    assert b"[DONE]" not in data
    assert b"\n: " not in data


def test_what_codex_sends_is_taken(server: Running, engine: Engine) -> None:
    request = read_responses(CODEX, MODEL)
    assert [m["role"] for m in request.messages] == ["system", "user", "user"]
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["exec_command"]
    with writing(engine, "Hm.\n</think>\n\nHello."):
        text = server.post(PATH, CODEX).text
    assert text.rstrip().rpartition("data: ")[2].startswith('{"type":"response.completed"')
    assert '"text":"Hello."' in text
