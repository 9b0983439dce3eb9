# SPDX-License-Identifier: Apache-2.0
"""The dialect ``/v1/responses``: from a JSON object to a request, and from a reply to JSON objects.

Pure functions: nothing here waits, reads or writes.  Nothing is stored either: a request brings the whole conversation.
Reasoning goes out as text and, for clients that send back nothing else, inside ``encrypted_content`` too.
Not handled, and refused by name: ``previous_response_id``, ``conversation``, ``background``, stored prompts, images and
files.  Tools other than functions are left out, as if they were not offered.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lily.server.blocks import Block, Blocks, Step
from lily.server.counts import Head, timings
from lily.server.errors import TOO_LONG, RequestError, wrong
from lily.server.fields import Fields
from lily.server.replies import Progress, Reply
from lily.server.requests import (
    EFFORTS,
    Model,
    Request,
    check_offered,
    continued,
    json_schema,
    limit,
    objects,
    read_priority,
    read_sampling,
    template_options,
    top_logprobs,
)
from lily.streaming import Completion, StreamChunk, TokenLogprob
from lily.text.demands import Demands, Tools
from lily.text.template import Message

_ENCRYPTED = b"lily1:"  # what the content that only we can read begins with
_LOGPROBS = "message.output_text.logprobs"
_FORMATS = ("text", "json_object", "json_schema")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_ABSENT = {
    "previous_response_id": "a response that was stored", "conversation": "a conversation that was stored",
    "prompt": "a prompt that was stored",
}  # fmt: skip


# ---- the request
def read_responses(body: Mapping[str, Any], model: Model) -> Request:
    """The request that ``body`` makes. RequestError (400) naming the field, InvalidRequestError from the messages."""
    fields = Fields(body)
    for name, what in _ABSENT.items():
        if fields.given(name) is not None:
            fields.unavailable(name, what, "nothing is stored here; send the whole conversation as input")
    if fields.flag("background"):
        fields.unavailable("background", "a response that is fetched later", "leave it out")
    messages, begun = continued(_messages(fields), "input")
    demands, tools = _tools(fields)
    demands = _format(fields, demands)
    reasoning = Fields(fields.mapping("reasoning") or {}, "reasoning")
    effort = reasoning.one_of("effort", EFFORTS)
    demands = replace(demands, reasoning_tokens=EFFORTS[effort] if effort not in (None, "none") else None)
    fields.flag("store")
    return Request(
        _sampling(fields, model), fields.flag("stream"), messages=messages, begun=begun, tools=tools, demands=demands,
        template_kwargs=template_options(fields, model, tools=tools is not None, thinking=thinks(effort)),
        prompt_field="input", echo=_echo(fields), priority=read_priority(fields),
    )  # fmt: skip


def thinks(effort: str | None) -> bool | None:
    """Whether the template is told to reason; None: it is not told."""
    return False if effort == "none" else None


def _sampling(fields: Fields, model: Model) -> dict[str, Any]:
    sampling = read_sampling(fields, model)
    sampling.pop("max_tokens", None)
    if (most := limit(fields, model, "max_output_tokens")) is not None:
        sampling["max_tokens"] = most
    include = fields.items("include") or []
    top = top_logprobs(fields, "top_logprobs")
    if _LOGPROBS in include:
        sampling["logprobs"] = top or 0
    elif top:
        raise wrong("top_logprobs", f"top_logprobs is {top}, but include does not ask for {_LOGPROBS}")
    return sampling


def _echo(fields: Fields) -> dict[str, Any]:
    """What the response repeats of the request."""
    reasoning = fields.mapping("reasoning") or {}
    return {
        "instructions": fields.given("instructions"), "max_output_tokens": fields.given("max_output_tokens"),
        "metadata": fields.mapping("metadata") or {}, "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": fields.given("temperature"), "text": fields.mapping("text") or {"format": {"type": "text"}},
        "tool_choice": fields.given("tool_choice") or "auto", "tools": fields.items("tools") or [],
        "top_p": fields.given("top_p"), "truncation": "disabled", "user": fields.given("user"),
        "prompt_cache_key": fields.given("prompt_cache_key"),
    }  # fmt: skip


def _format(fields: Fields, demands: Demands) -> Demands:
    text = Fields(fields.mapping("text") or {}, "text")
    given = text.mapping("format")
    if given is None:
        return demands
    inner = Fields(given, "text.format")
    kind = inner.choice("type", _FORMATS)
    if kind == "text":
        return demands
    return replace(demands, schema=json_schema(inner) if kind == "json_schema" else {})


def _tools(fields: Fields) -> tuple[Demands, Tools | None]:
    """What is demanded of calls, and the functions among the tools in the chat's form."""
    tools = [_function(tool) for tool in objects(fields, "tools") if tool.given("type") == "function"]
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.given("tool_choice")
    if isinstance(choice, dict):
        return _chosen(Fields(choice, "tool_choice"), tools, parallel)
    mode = fields.one_of("tool_choice", ("auto", "none", "required"))
    return _by_mode(mode, tools, parallel)


def _function(fields: Fields) -> dict[str, Any]:
    if not fields.text("name"):
        fields.refuse("name", "the function's name")
    fields.text("description")
    fields.mapping("parameters")
    function = {name: fields.given(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _chosen(choice: Fields, tools: Tools, parallel: bool) -> tuple[Demands, Tools | None]:
    kind = choice.choice("type", ("function", "allowed_tools"))
    if kind == "allowed_tools":
        names = [tool.get("name") for tool in choice.items("tools") or () if isinstance(tool, dict)]
        allowed = [tool for tool in tools if tool["function"]["name"] in names]
        return _by_mode(choice.one_of("mode", ("auto", "required")), allowed, parallel)
    name = choice.text("name")
    check_offered(choice, name, tools)
    return Demands(call=True, function=name, parallel=parallel), tools


def _by_mode(mode: str | None, tools: Tools, parallel: bool) -> tuple[Demands, Tools | None]:
    if mode == "required" and not tools:
        raise wrong("tool_choice", "tool_choice is required, but tools has no function; give at least one")
    if mode == "none" or not tools:
        return Demands(), None
    return Demands(call=mode == "required", parallel=parallel), tools


# ---- its messages
def _messages(fields: Fields) -> list[Message]:
    given = fields.given("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        fields.refuse("input", "a string, or a list of items")
    messages = _Messages()
    if (instructions := fields.text("instructions")) is not None:
        messages.add({"role": "system", "content": instructions})
    for item in objects(Fields({"input": given}), "input"):
        _take(item, messages)
    return messages.all


class _Messages:
    """Messages of a chat; items of the model that follow each other are one message of the assistant."""

    def __init__(self) -> None:
        self.all: list[Message] = []
        self._own: Message | None = None  # the last message, while it is the assistant's and may still grow

    def add(self, message: Message) -> None:
        """A message of its own."""
        self.all.append(message)
        self._own = None

    def own(self) -> Message:
        """The assistant's message to which the next item belongs."""
        if self._own is None:
            self._own = {"role": "assistant", "content": ""}
            self.all.append(self._own)
        return self._own

    def say(self, text: str) -> None:
        """Text of the assistant; after calls it is another message."""
        if self._own is not None and (self._own["content"] or "tool_calls" in self._own):
            self._own = None
        self.own()["content"] = text

    def reason(self, text: str) -> None:
        """Reasoning, which begins a message of the assistant."""
        if self._own is not None and (self._own["content"] or "tool_calls" in self._own):
            self._own = None
        message = self.own()
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), text)))


def _take(item: Fields, messages: _Messages) -> None:
    kind = item.given("type")
    if kind is None and item.given("role") is not None:
        kind = "message"
    if kind == "message":
        _take_message(item, messages)
    elif kind == "reasoning":
        if text := _reasoning(item):
            messages.reason(text)
    elif kind == "function_call":
        call = {name: item.text(name) for name in ("call_id", "name", "arguments")}
        if not call["name"]:
            item.refuse("name", "the function's name")
        function = {"name": call["name"], "arguments": call["arguments"]}
        messages.own().setdefault("tool_calls", []).append(
            {"id": call["call_id"], "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        message = {"role": "tool", "tool_call_id": item.text("call_id"), "content": _text(item, "output")}
        messages.add(message)
    else:
        item.refuse("type", ", ".join(_ITEMS))


def _take_message(item: Fields, messages: _Messages) -> None:
    role = item.choice("role", _ROLES)
    text = _text(item, "content")
    if role == "assistant":
        messages.say(text)
    else:
        messages.add({"role": role, "content": text})


def _text(item: Fields, name: str) -> str:
    """A string, or the texts of a list of blocks."""
    given = item.given(name)
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        item.refuse(name, "a string, or a list of text blocks")
    return "".join(_block_text(block, f"{item.name(name)}[{index}]") for index, block in enumerate(given))


def _block_text(block: object, where: str) -> str:
    fields = Fields(block if isinstance(block, dict) else {}, where)
    kind = fields.given("type")
    if kind == "refusal":
        return fields.text("refusal") or ""
    if kind not in ("input_text", "output_text", "text"):
        fields.refuse("type", "input_text, output_text; Lily reads text only")
    text = fields.text("text")
    if text is None:
        fields.refuse("text", "a string")
    return text


def _reasoning(item: Fields) -> str:
    """The text of a reasoning item: as it is, or as we have wrapped it; "" of what others have encrypted."""
    blocks = [block for block in item.items("content") or () if isinstance(block, dict)]
    texts = [text for block in blocks if isinstance(text := block.get("text"), str)]
    return "".join(texts) or unwrapped(item.text("encrypted_content") or "")


def wrapped(text: str) -> str:
    """Reasoning as ``encrypted_content``. It is not secret, but clients send it back as they got it."""
    return base64.b64encode(_ENCRYPTED + text.encode()).decode()


def unwrapped(content: str) -> str:
    """What ``wrapped`` made; "" if it is something else."""
    try:
        data = base64.b64decode(content, validate=True)
        return data.removeprefix(_ENCRYPTED).decode() if data.startswith(_ENCRYPTED) else ""
    except (binascii.Error, ValueError):
        return ""


# ---- the reply
class ResponsesReply(Reply):
    """A reply in the dialect's objects. ``token_bytes`` gives the bytes of a token id."""

    ordered = True
    closing = b""

    def __init__(self, head: Head, request: Request, token_bytes: Callable[[int], bytes]) -> None:
        self._head, self._request, self._bytes = head, request, token_bytes
        self._begun = False
        self._events = 0
        self._blocks = Blocks()
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._logprobs: list[dict[str, Any]] = []  # of the open item's text
        self._end: dict[str, Any] = {}

    def begin(self, prompt: Progress) -> Iterator[dict[str, Any]]:
        """Two events that say that there is a response."""
        if not self._begun:
            self._begun = True
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))

    def alive(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """An event: there are clients whose patience a comment does not renew."""
        if not self._begun:
            yield from self.begin(progress)
        else:
            yield self._event("in_progress", response=self._response("in_progress"))

    def push(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk; with the end come the last ones."""
        logprobs = self._logprob_objects(chunk.logprobs or []) if chunk.text else []
        for step, block, text in self._blocks.push(chunk):
            if step is Step.BEGIN:
                yield from self._item_begins(block)
            elif step is Step.GROW:
                yield self._item_grows(block, text, logprobs)
            else:
                yield from self._item_ends(block)
        if chunk.completion is not None:
            status = "incomplete" if chunk.completion.finish_reason == "length" else "completed"
            self._end = self._response(status, chunk.completion)
            yield self._event(status, response=self._end)

    def whole(self, reply: Completion) -> dict[str, Any]:
        """The response at its end."""
        return self._end

    def streams(self, error: RequestError) -> bool:
        """A prompt that is too long is said by an event, by which Codex knows that it has to shorten it."""
        return error.code == TOO_LONG

    def failed(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """A response that has failed."""
        yield from self.begin(None)
        told = {"code": error.code or "server_error", "message": str(error)}
        yield self._event("failed", response={**self._response("failed"), "error": told})

    # ---- items
    def _item_begins(self, block: Block) -> Iterator[dict[str, Any]]:
        self._logprobs = []
        yield self._event("output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
        if block.kind != "call":
            yield self._event("content_part.added", **self._place(block), part=self._part(block, ""))

    def _item_grows(self, block: Block, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if block.kind == "call":
            place = {"item_id": self._id(block), "output_index": block.index}
            return self._event("function_call_arguments.delta", **place, delta=text)
        if block.kind == "reasoning":
            return self._event("reasoning_text.delta", **self._place(block), delta=text)
        self._logprobs += logprobs
        return self._event("output_text.delta", **self._place(block), delta=text, logprobs=logprobs)

    def _item_ends(self, block: Block) -> Iterator[dict[str, Any]]:
        text = block.text
        if block.kind == "call":
            if not block.complete:  # clients run what is done
                return
            place = {"item_id": self._id(block), "output_index": block.index}
            yield self._event("function_call_arguments.done", **place, name=block.name, arguments=text)
        else:
            if block.kind == "reasoning":
                yield self._event("reasoning_text.done", **self._place(block), text=text)
            else:
                yield self._event("output_text.done", **self._place(block), text=text, logprobs=self._logprobs)
            yield self._event("content_part.done", **self._place(block), part=self._part(block, text))
        item = self._item(block, "completed")
        self._output.append(item)
        yield self._event("output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        done = status == "completed"
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text if done else ""}
            return {**head, "type": "function_call", **call}
        content = [self._part(block, block.text)] if done else []
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        encrypted = wrapped(block.text) if done else None
        return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": encrypted}

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self._logprobs if text else [], "text": text}

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index, "content_index": 0}

    def _id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._head.id.rpartition('_')[2]}{block.index}"

    # ---- the response
    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._events = self._events, self._events + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _response(self, status: str, reply: Completion | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": self._head.id, "object": "response", "created_at": self._head.created, "model": self._head.model,
            "status": status, "error": None, "incomplete_details": reason, "output": list(self._output),
            "previous_response_id": None, "store": False, "background": False, "usage": None, **self._request.echo,
        }  # fmt: skip
        if reply is not None:
            response |= {"usage": _usage(reply), "timings": timings(reply)}
        return response

    def _logprob_objects(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {**self._token(each.token_id, each.logprob), "top_logprobs": [self._token(*top) for top in each.top]}
            for each in logprobs
        ]

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _usage(reply: Completion) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
