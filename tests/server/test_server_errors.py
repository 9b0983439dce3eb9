# SPDX-License-Identifier: Apache-2.0
"""Every way to ask wrongly, and every way to fail: status, the field at fault, and a server that goes on."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from chats import STRICT, S
from server_harness import HI, JSON, Running, events, gated, open_tiny, serving
from waiting import until

from lily.engine import Engine
from lily.errors import DeviceError
from lily.run.runner import Runner
from lily.server import app as app_module
from lily.server.chat import ChatReply
from lily.text.template import ChatTemplate

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
USER = {"role": "user"}

WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [*HI, {"content": "x"}]}, "messages[1]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
    ({"messages": [USER]}, "messages[0]"),
    ({"messages": [{**USER, "content": 5}]}, "messages[0].content"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "a"}, IMAGE]}]}, "messages[0].content[1]"),
    ({"messages": [{"role": "assistant", "content": "alone"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"frequency_penalty": []}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "a"}}, "logit_bias[1]"),
    ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias"),
    ({"seed": 1.5}, "seed"),
    ({"seed": -1}, "seed"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"n": 9}, "n"),
    ({"n": 0}, "n"),
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": 7}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"priority": "high"}, "priority"),
    ({"priority": 1 << 40}, "priority"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
]  # fmt: skip
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [99999999]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "n": 9}, "n"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "priority": 0.5}, "priority"),
]
WRONG_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "content"),
    ("/tokenize", {"content": 3}, "content"),
    ("/tokenize", {"messages": [3]}, "messages[0]"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/apply-template", {"messages": []}, "messages"),
]
NO_OBJECTS = [
    b"", b"{", b"[]", b'"x"', b"3", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"prompt": "a", "stop": "\\uD800"}', b'{"seed": ' + b"9" * 5000 + b"}",
]  # fmt: skip


def fails(server: Running, path: str, body: dict[str, Any], param: str | None, status: int = 400) -> dict[str, Any]:
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert 0 < len(error["message"]) <= 500
    return dict(error)


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=str)
def test_a_wrong_field_of_a_chat_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    error = fails(server, "/v1/chat/completions", {"messages": HI, **fields}, param)
    assert param.split("[")[0].split(".")[0] in error["message"]
    streamed = {"messages": HI, "stream": True, **fields}
    assert fails(server, "/v1/chat/completions", streamed, param)["message"] == error["message"]


@pytest.mark.parametrize(("body", "param"), WRONG_COMPLETIONS, ids=str)
def test_a_wrong_field_of_a_completion_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    assert param in fails(server, "/v1/completions", body, param)["message"] or body["prompt"] == [99999999]


@pytest.mark.parametrize(("path", "body", "param"), WRONG_TOKENS, ids=str)
def test_a_wrong_field_of_the_token_endpoints_is_named(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    fails(server, path, body, param)


def test_what_is_not_there_yet_is_said_to_be_so(server: Running) -> None:
    error = server.post("/v1/completions", {"prompt": "Hi", "echo": True}).json()["error"]
    assert error["code"] == "not_available"
    assert "not available yet" in error["message"]


def test_an_image_is_refused_by_name(server: Running) -> None:
    error = fails(
        server, "/v1/chat/completions", {"messages": [{**USER, "content": [IMAGE]}]}, "messages[0].content[0]"
    )
    assert "image" in error["message"]


@pytest.mark.parametrize("body", NO_OBJECTS, ids=lambda body: repr(body[:40]))
def test_a_body_that_is_no_json_object_is_refused(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = server.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert response.json()["error"]["param"] is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_that_fits_nowhere_is_refused_with_both_counts(server: Running, engine: Engine, path: str) -> None:
    def body(tokens: int) -> dict[str, Any]:
        if path == "/v1/completions":
            return {"prompt": [300] * tokens}
        frame = len(engine.render_chat([{**USER, "content": ""}]))
        return {"messages": [{**USER, "content": " a" * (tokens - frame)}]}

    limit = engine.max_context
    field = "prompt" if path == "/v1/completions" else "messages"
    usage = server.post(path, {**body(limit - 1), "ignore_eos": True, "max_tokens": 9}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (limit - 1, 1)
    for tokens in (limit, limit + 1):
        for stream in (False, True):
            error = fails(server, path, {**body(tokens), "stream": stream}, field)
            assert error["code"] == "context_length_exceeded"
            assert f"{tokens:,}" in error["message"] or str(tokens) in error["message"]
            assert f"{limit:,}" in error["message"] or str(limit) in error["message"]


def test_a_path_or_method_that_is_not_there_is_said_with_those_that_are(server: Running) -> None:
    response = server.get("/v1/embeddings")
    assert response.status_code == 404
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    response = server.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert server.post("/health", {}).status_code == 405


def test_a_failed_device_fails_one_request_only(server: Running) -> None:
    def request(stream: bool) -> Any:
        return server.chat(stream=stream, seed=1, max_tokens=4)

    want = request(False).json()["choices"]
    for stream in (False, True):
        failure = DeviceError("the device is on fire")
        with mock.patch.object(Runner, "start", side_effect=failure):
            response = request(stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the device is on fire"
        assert response.json()["error"]["code"] == "device_error"
        assert server.get("/health").json()["status"] == "ok"
        assert request(False).json()["choices"] == want


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(server: Running) -> None:
    """Only tokens were sent before it; a client that reads on finds an error instead of the end."""
    real = app_module.open_stream

    class Breaking:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()

        def cancel(self) -> None:
            self._stream.cancel()

        def __iter__(self) -> Any:
            yield next(self._stream)
            yield next(self._stream)
            raise DeviceError("the device is on fire")

    with mock.patch.object(app_module, "open_stream", lambda *given: Breaking(real(*given))):
        response = server.chat(stream=True, seed=1)
    assert response.status_code == 200
    assert response.text.startswith('data: {"id"')
    last = response.text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith('data: {"error":{"message":"the device is on fire","type":"server_error"')
    assert "[DONE]" not in response.text
    assert events(server.chat(stream=True, max_tokens=2).text)


def test_a_bug_is_told_without_the_prompt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(app_module, "open_stream", side_effect=ZeroDivisionError("SECRET")):
        response = server.chat()
    assert response.status_code == 500
    assert "ZeroDivisionError" in response.json()["error"]["message"]
    assert "SECRET" not in response.text + caplog.text
    assert "ZeroDivisionError at " in caplog.text
    assert server.chat(max_tokens=1).status_code == 200


def test_a_bug_while_a_reply_is_sent_ends_the_reply(server: Running) -> None:
    with mock.patch.object(ChatReply, "push", side_effect=ZeroDivisionError):
        response = server.chat(stream=True, ignore_eos=True)
        assert response.text.endswith('"code":"bug"}}\n\n')
        server.is_free()


def test_nothing_of_a_prompt_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "lily.server")
    secret = [{**USER, "content": "SECRET"}]
    assert server.chat({"messages": secret}, max_tokens=2).status_code == 200
    assert server.chat({"messages": secret}, max_tokens=0).status_code == 400
    assert server.chat({"messages": [{**USER, "content": "SECRET " * 2000}]}).status_code == 400
    assert "of prompt" in caplog.text
    assert "context_length_exceeded" in caplog.text
    assert "SECRET" not in caplog.text


def test_a_model_without_a_template_is_told_without_its_path(server: Running, engine: Engine) -> None:
    folder = str(engine.model.path)
    with mock.patch.object(engine, "chat_template", ChatTemplate(None, origin=folder)):
        error = fails(server, "/v1/chat/completions", {"messages": HI}, "messages")
        assert "has no chat template" in error["message"]
        assert folder not in error["message"]
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_what_the_template_refuses_is_a_wrong_request_in_its_words(server: Running, engine: Engine, path: str) -> None:
    """As the real one, which wants a message of the user."""
    strict = ChatTemplate("{% if enable_thinking %}{% endif %}" + STRICT)
    with mock.patch.object(engine, "chat_template", strict):
        for stream in (False, True):
            body = {"input" if path == "/v1/responses" else "messages": [S], "max_tokens": 9, "stream": stream}
            response = server.post(path, body)
            assert response.status_code == 400
            assert "No user query found in messages." in response.json()["error"]["message"]


def test_no_body_whatever_it_holds_is_a_failure_of_the_server(server: Running) -> None:
    """Bodies of a legal request with values replaced, at every depth, by others."""
    draw = random.Random(11)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    whole = {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
                     {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "c"},
                     {"role": "tool", "content": "d", "tool_call_id": "c"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "max_tokens": 1, "stream": False, "stream_options": {"include_usage": True},
        "stop": ["x"], "temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "seed": 1,
        "logprobs": True, "top_logprobs": 1, "n": 1, "response_format": {"type": "text"}, "presence_penalty": 0.1,
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "prompt": "a",
    }  # fmt: skip
    odd = [None, True, 0, -1, 1e400, 10**30, 0.5, "", "x", "\x00", "\U0001f600<|im_start|>", [], {}, [[]], [None], [{}],
           {"": None}, {"type": "text"}, {"role": "user"}, ["a"] * 40]  # fmt: skip

    def changed(value: Any) -> Any:
        if draw.random() < 0.04:
            return draw.choice(odd)
        if isinstance(value, dict):
            return {key: changed(inner) for key, inner in value.items() if draw.random() > 0.02}
        return [changed(inner) for inner in value] if isinstance(value, list) else value

    seen = set()
    for number in range(300):
        body = json.dumps(changed(whole)).replace("Infinity", "1e400").encode()
        path = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/apply-template")[number % 4]
        response = server.post(path, content=body, headers=JSON)
        assert response.status_code in (200, 400), (body, response.text)
        seen.add(response.status_code)
        if response.status_code == 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert seen == {200, 400}


def test_a_full_queue_is_said_with_when_to_come_again(engine: Engine) -> None:
    with serving(engine, queue=1) as server, gated() as gate:
        count = engine.sequences + 1
        waiting = [server.connect("/v1/chat/completions", messages=HI, max_tokens=1) for _ in range(count)]
        until(lambda: gate.reached == count, "one request runs in each sequence and one waits")
        response = server.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert int(response.headers["retry-after"]) > 0
        assert server.get("/health").json() == {"status": "ok", "requests": count}
        gate.open()
        server.is_free()
        assert server.chat(max_tokens=1).status_code == 200
        for connection in waiting:
            connection.close()


def test_many_clients_at_once_are_all_served(server: Running) -> None:
    """Agents send 16 requests at once and more; none is sent away."""
    with gated() as gate, ThreadPoolExecutor(33) as pool:
        replies = [pool.submit(server.chat, seed=n, max_tokens=2) for n in range(33)]
        until(lambda: gate.reached == 33, "all of them are taken in")
        gate.open()
        assert {reply.result().status_code for reply in replies} == {200}


def test_a_closed_engine_is_told_by_health_and_by_every_request() -> None:
    engine = open_tiny(max_context=64)
    with serving(engine) as server:
        assert server.get("/health").status_code == 200
        engine.close()
        response = server.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "closed")
        assert server.chat().status_code == 503
        assert server.chat(stream=True).status_code == 503


def test_an_engine_that_is_closed_while_a_request_waits_is_no_fault_of_the_request() -> None:
    engine = open_tiny(max_context=64)
    with serving(engine) as server, gated() as gate, ThreadPoolExecutor(1) as pool:
        response = pool.submit(server.chat)
        until(lambda: gate.reached == 1, "the request is on its way")
        engine.close()
        gate.open()
        assert (response.result().status_code, response.result().json()["error"]["code"]) == (503, "stopping")
