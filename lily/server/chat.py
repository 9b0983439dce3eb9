# SPDX-License-Identifier: Apache-2.0
"""The dialect ``/v1/chat/completions``: from a JSON object to a request, and from a reply to JSON objects.

Pure functions: nothing here waits, reads or writes.
Several replies (``n``) come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lily.server.counts import Head, timings, usage
from lily.server.errors import wrong
from lily.server.fields import Fields
from lily.server.replies import Choices, Progress
from lily.server.requests import (
    EFFORTS,
    Model,
    Request,
    continued,
    objects,
    read_number_of_replies,
    read_priority,
    read_sampling,
    read_streaming,
    template_options,
    top_logprobs,
)
from lily.streaming import Completion, StreamChunk, TokenLogprob, ToolCallDelta
from lily.text.demands import demands_of, offered_tools
from lily.text.template import Message


def read_chat(body: Mapping[str, Any], model: Model) -> Request:
    """The request that ``body`` makes. RequestError (400) naming the field, InvalidRequestError from the messages."""
    fields = Fields(body)
    tools = _tools(fields)
    messages, begun = _messages(fields)
    stream, with_usage = read_streaming(fields)
    sampling = read_sampling(fields, model)
    top = top_logprobs(fields, "top_logprobs")
    if fields.flag("logprobs"):
        sampling["logprobs"] = top or 0
    elif top:
        raise wrong("top_logprobs", f"top_logprobs is {top} without logprobs; set logprobs to true, too")
    effort = fields.one_of("reasoning_effort", EFFORTS)
    thinking = False if effort == "none" else None
    choice = fields.given("tool_choice")
    demands = demands_of(
        tools, tool_choice=choice, parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        response_format=fields.mapping("response_format"), reasoning_budget=_budget(fields, effort),
    )  # fmt: skip
    offered = offered_tools(tools, choice)
    return Request(
        sampling, stream, with_usage, messages=messages, begun=begun, tools=offered, demands=demands,
        template_kwargs=template_options(fields, model, tools=offered is not None, thinking=thinking),
        priority=read_priority(fields), replies=read_number_of_replies(fields),
    )  # fmt: skip


def _messages(fields: Fields) -> tuple[list[Message], Message | None]:
    """The messages, and the last one if it is a reply that is to go on."""
    given = fields.items("messages")
    if given is None:
        fields.refuse("messages", "a list of messages, each with role and content")
    return continued(given, "messages")


def _tools(fields: Fields) -> list[Mapping[str, Any]]:
    for tool in objects(fields, "tools"):
        _check_tool(tool)
    return fields.items("tools") or []


def _budget(fields: Fields, effort: str | None) -> int | None:
    """Tokens that the reasoning may have, by itself or as an effort."""
    for name in ("reasoning_budget", "thinking_budget"):
        if (given := fields.whole(name, 0)) is not None:
            return given
    return None if effort in (None, "none") else EFFORTS[effort]


def _check_tool(fields: Fields) -> None:
    fields.choice("type", ("function",))
    function = fields.mapping("function")
    if function is None:
        fields.refuse("function", "an object with name, description and parameters")
    inner = Fields(function, fields.name("function"))
    if not inner.text("name"):
        inner.refuse("name", "the function's name")
    inner.text("description")
    inner.mapping("parameters")


class ChatReply(Choices):
    """A reply in the dialect's objects. ``token_bytes`` gives the bytes of a token id."""

    def __init__(self, head: Head, request: Request, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__(request)
        self._head, self._request, self._bytes = head, request, token_bytes
        self._logprobs: list[TokenLogprob] = []  # of tokens that have shown nothing yet

    def begin(self, prompt: Progress) -> Iterator[dict[str, Any]]:
        """What comes before the first token."""
        yield self._event({"role": "assistant", "content": ""})

    def push(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The events that a chunk makes; one with the end makes the last ones."""
        self._logprobs += chunk.logprobs or ()
        if chunk.reasoning:
            yield self._event({"reasoning_content": chunk.reasoning})
        if chunk.text:
            yield self._event({"content": chunk.text})
        if chunk.tool_calls:
            yield self._event({"tool_calls": [_call_delta(part) for part in chunk.tool_calls]})
        if chunk.completion is not None:
            yield from self._end(chunk.completion)

    def whole(self, reply: Completion) -> dict[str, Any]:
        """The response that is not streamed."""
        replies = self._all(reply)
        return {
            **self._head.of("chat.completion"),
            "choices": [self._choice(index, one) for index, one in enumerate(replies)],
            "usage": usage(*replies),
            "timings": timings(reply),
        }

    def _choice(self, index: int, reply: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        return {
            "index": index, "message": message, "logprobs": self._logprob_object(reply.logprobs),
            "finish_reason": reply.finish_reason,
        }  # fmt: skip

    def _end(self, reply: Completion) -> Iterator[dict[str, Any]]:
        last = self._event({}, reply.finish_reason)
        yield last if self._request.usage else {**last, "timings": timings(reply)}
        self._done.append(reply)
        if self._index < self._replies:
            yield from self.begin(None)
        elif self._request.usage:
            yield {**self._chunk_head(), "choices": [], "usage": usage(*self._done), "timings": timings(reply)}

    def _event(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = self._logprob_object(self._logprobs or None)
        self._logprobs = []
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._chunk_head(), "choices": [choice]}

    def _chunk_head(self) -> dict[str, Any]:
        head = self._head.of("chat.completion.chunk")
        return {**head, "usage": None} if self._request.usage else head

    def _logprob_object(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(id, value) for id, value in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _call_delta(part: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name is not None:
        function = {"name": part.name, **function}
    begins = {"id": part.id, "type": "function"} if part.id is not None else {}
    return {"index": part.index, **begins, "function": function}
