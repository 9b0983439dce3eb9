# SPDX-License-Identifier: Apache-2.0
"""What a client has of a reply in the end, in whichever dialect, in one piece or put together from a stream.

A stream is put together from its deltas alone; where it ends with the whole reply as well, both must say the same.
Not handled: several replies to one request; what must not be in a stream (the tests of the dialects).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lily.streaming import Completion

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


@dataclass
class Answer:
    """calls: name and arguments of the complete ones. reason: as OpenAI's chat names it."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, reply: Completion) -> Answer:
        """What the engine says itself."""
        calls = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        logprobs = [entry.logprob for entry in reply.logprobs or ()]
        return cls(
            reply.reasoning or "", reply.text, calls, reply.finish_reason, reply.prompt_tokens,
            reply.completion_tokens, logprobs,
        )  # fmt: skip


def received(path: str, body: bytes | str, *, stream: bool) -> Answer:
    """What is in the body of a response with the status 200."""
    text = body.decode() if isinstance(body, bytes) else body
    if not stream:
        return _WHOLE[path](json.loads(text))
    return _STREAMED[path](_events(text, done=path in (CHAT, COMPLETIONS)))


def check_refusal(path: str, body: str) -> None:
    """An error in the shape of the dialect that speaks at ``path``."""
    value = json.loads(body)
    names = {"message", "type"}
    if path.startswith(MESSAGES):
        assert value.pop("type") == "error"
    else:
        names |= {"param", "code"}
    assert set(value) == {"error"}
    assert set(value["error"]) == names
    assert 0 < len(value["error"]["message"]) <= 500


def _events(text: str, *, done: bool) -> list[dict[str, Any]]:
    """The objects of a stream; ``done``: the word with which it has to end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if done:
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _complete(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Without a last one that was cut off: its arguments are no JSON."""
    found = []
    for number, (name, arguments) in enumerate(calls):
        try:
            found.append((name, json.loads(arguments)))
        except json.JSONDecodeError:
            assert number == len(calls) - 1
    return found


def _counted(answer: Answer, usage: dict[str, Any]) -> Answer:
    """With the counts, under the names that three of the dialects have for them."""
    names = ("input_tokens", "output_tokens") if "input_tokens" in usage else ("prompt_tokens", "completion_tokens")
    answer.prompt_tokens, answer.tokens = (usage[name] for name in names)
    answer.prompt_tokens += usage.get("cache_read_input_tokens", 0)
    return answer


# ---- /v1/chat/completions
def _chat(body: dict[str, Any]) -> Answer:
    [choice] = body["choices"]
    message = choice["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
    content = (choice["logprobs"] or {"content": ()})["content"]
    answer = Answer(message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"])
    answer.logprobs = [entry["logprob"] for entry in content]
    return _counted(answer, body["usage"])


def _streamed_chat(events: list[dict[str, Any]]) -> Answer:
    answer, calls = Answer(), list[list[str]]()
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            answer.reasoning += delta.get("reasoning_content", "")
            answer.text += delta.get("content", "")
            answer.logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {"content": ()})["content"]]
            answer.reason = choice["finish_reason"] or answer.reason
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append([part["function"]["name"], ""])
                assert part["index"] == len(calls) - 1
                calls[-1][1] += part["function"]["arguments"]
    answer.calls = _complete([(name, arguments) for name, arguments in calls])
    return _counted(answer, events[-1]["usage"])


# ---- /v1/completions
def _completion(body: dict[str, Any]) -> Answer:
    [choice] = body["choices"]
    logprobs = (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    return _counted(Answer("", choice["text"], [], choice["finish_reason"], logprobs=logprobs), body["usage"])


def _streamed_completion(events: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for choice in (choice for event in events for choice in event["choices"]):
        answer.text += choice["text"]
        answer.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        answer.reason = choice["finish_reason"] or answer.reason
    return _counted(answer, events[-1]["usage"])


# ---- /v1/responses
def _response(body: dict[str, Any]) -> Answer:
    answer = Answer()
    for item in body["output"]:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], json.loads(item["arguments"])))
            continue
        for part in item["content"]:
            if item["type"] == "reasoning":
                answer.reasoning += part["text"]
            else:
                answer.text += part["text"]
                answer.logprobs += [entry["logprob"] for entry in part.get("logprobs", ())]
    answer.reason = "length" if body["status"] == "incomplete" else "tool_calls" if answer.calls else "stop"
    return _counted(answer, body["usage"])


def _streamed_response(events: list[dict[str, Any]]) -> Answer:
    answer, calls = Answer(), list[list[str]]()
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "reasoning_text.delta":
            answer.reasoning += event["delta"]
        elif kind == "output_text.delta":
            answer.text += event["delta"]
        elif kind == "output_item.added" and event["item"]["type"] == "function_call":
            calls.append([event["item"]["name"], ""])
        elif kind == "function_call_arguments.delta":
            calls[-1][1] += event["delta"]
    whole = _response(events[-1]["response"])
    answer.calls = _complete([(name, arguments) for name, arguments in calls])
    assert (answer.reasoning, answer.text, answer.calls) == (whole.reasoning, whole.text, whole.calls)
    return whole


# ---- /v1/messages
def _message(body: dict[str, Any]) -> Answer:
    answer = Answer(reason=_REASONS[body["stop_reason"]])
    for block in body["content"]:
        answer.reasoning += block.get("thinking", "")
        answer.text += block.get("text", "")
        if block["type"] == "tool_use":
            answer.calls.append((block["name"], block["input"]))
    return _counted(answer, body["usage"])


def _streamed_message(events: list[dict[str, Any]]) -> Answer:
    answer, calls, usage = Answer(), list[list[str]](), {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            answer.reasoning += delta.get("thinking", "")
            answer.text += delta.get("text", "")
            if delta["type"] == "input_json_delta":
                calls[-1][1] += delta["partial_json"]
        elif event["type"] == "message_delta":
            answer.reason, usage = _REASONS[event["delta"]["stop_reason"]], event["usage"]
    answer.calls = _complete([(name, arguments) for name, arguments in calls])
    return _counted(answer, usage)


_WHOLE = {CHAT: _chat, COMPLETIONS: _completion, RESPONSES: _response, MESSAGES: _message}
_STREAMED = {
    CHAT: _streamed_chat, COMPLETIONS: _streamed_completion, RESPONSES: _streamed_response,
    MESSAGES: _streamed_message,
}  # fmt: skip
