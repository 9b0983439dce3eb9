# SPDX-License-Identifier: Apache-2.0
"""The dialect ``/v1/messages``: from a JSON object to a request, and from a reply to JSON objects.

Pure functions: nothing here waits, reads or writes.
What callers may rely on: thinking that is sent back is read as the reasoning that it was; a system block that only says
who is billed, and changes with every request, is dropped, since it would end every shared beginning; tools that run on
the provider's machines are left out, as if they were not offered.
Not handled, and refused by name: images, documents other than text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from lily.server.blocks import Block, Blocks, Step
from lily.server.counts import Head
from lily.server.errors import RequestError
from lily.server.fields import Fields
from lily.server.replies import Progress, Reply
from lily.server.requests import (
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
)
from lily.streaming import Completion, StreamChunk
from lily.text.demands import Demands, Tools
from lily.text.template import Message

BILLING = "x-anthropic-billing-header:"
_ROLES = ("user", "assistant", "system")
_CHOICES = ("auto", "any", "tool", "none")
_THINKING = ("enabled", "adaptive", "disabled")
_SKIPPED = ("redacted_thinking", "server_tool_use", "web_search_tool_result")  # of replies that others have written


# ---- the request
def read_messages(body: Mapping[str, Any], model: Model) -> Request:
    """The request that ``body`` makes. RequestError (400) naming the field, InvalidRequestError from the messages."""
    fields = Fields(body)
    if fields.given("max_tokens") is None:
        fields.refuse("max_tokens", "a whole number from 1")
    return _read(fields, model)


def read_to_count(body: Mapping[str, Any], model: Model) -> Request:
    """The same of a request whose tokens are only to be counted, which needs no ``max_tokens``."""
    return _read(Fields(body), model)


def _read(fields: Fields, model: Model) -> Request:
    messages, begun = continued(_messages(fields), "messages")
    thinking, budget = _thinking(fields)
    demands, tools = _tools(fields)
    demands = Demands(demands.call, demands.function, demands.parallel, _schema(fields), budget)
    return Request(
        _sampling(fields, model), fields.flag("stream"), messages=messages, begun=begun, tools=tools, demands=demands,
        template_kwargs=template_options(fields, model, tools=tools is not None, thinking=thinking),
        priority=read_priority(fields),
    )  # fmt: skip


def _sampling(fields: Fields, model: Model) -> dict[str, Any]:
    sampling = read_sampling(fields, model)
    most, stops = limit(fields, model, "max_tokens"), fields.items("stop_sequences")
    given = {"max_tokens": most, "stop": stops or None}
    return {**sampling, **{name: value for name, value in given.items() if value is not None}}


def _thinking(fields: Fields) -> tuple[bool, int | None]:
    """Whether the reply begins with reasoning, and how many tokens of it at most. Off where nothing is said of it."""
    given = Fields(fields.mapping("thinking") or {"type": "disabled"}, "thinking")
    kind = given.choice("type", _THINKING)
    return kind != "disabled", given.whole("budget_tokens", 1) if kind == "enabled" else None


def _schema(fields: Fields) -> Mapping[str, Any] | None:
    config = Fields(fields.mapping("output_config") or {}, "output_config")
    where = config if config.given("format") is not None else fields
    name = "format" if where is config else "output_format"
    given = where.mapping(name)
    if given is None:
        return None
    inner = Fields(given, where.name(name))
    inner.choice("type", ("json_schema",))
    return json_schema(inner)


def _tools(fields: Fields) -> tuple[Demands, Tools | None]:
    """What is demanded of calls, and the client's own tools in the chat's form."""
    tools = [_function(tool) for tool in objects(fields, "tools") if tool.given("type") in (None, "custom")]
    choice = Fields(fields.mapping("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = choice.choice("type", _CHOICES)
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind in ("any", "tool") and not tools:
        choice.refuse("type", "auto or none, since tools has none")
    if kind == "none" or not tools:
        return Demands(), None
    name = choice.text("name") if kind == "tool" else None
    if kind == "tool":
        check_offered(choice, name, tools)
    return Demands(call=kind in ("any", "tool"), function=name, parallel=parallel), tools


def _function(fields: Fields) -> dict[str, Any]:
    name, schema = fields.text("name"), fields.mapping("input_schema")
    if not name:
        fields.refuse("name", "the tool's name")
    if schema is None:
        fields.refuse("input_schema", "an object, the JSON schema of the tool's input")
    description = fields.text("description")
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


# ---- its messages
def _messages(fields: Fields) -> list[Message]:
    if not fields.items("messages"):
        fields.refuse("messages", "a list of messages, each with role and content")
    messages = _system(fields)
    for item in objects(fields, "messages"):
        role = item.choice("role", _ROLES)
        blocks = _blocks(item, "content")
        if role == "assistant":
            messages.append(_assistant(blocks))
        elif role == "system":
            messages.append({"role": "system", "content": "".join(map(_text, blocks))})
        else:
            messages += _user(blocks)
    return messages


def _system(fields: Fields) -> list[Message]:
    if fields.given("system") is None:
        return []
    texts = [_text(block) for block in _blocks(fields, "system")]
    kept = [text for text in texts if not text.startswith(BILLING)]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """The blocks of a content; a string is one of text, and nothing is none."""
    given = fields.given(name)
    if given is None:
        return []
    if isinstance(given, str):
        return [Fields({"type": "text", "text": given}, fields.name(name))]
    if not isinstance(given, list):
        fields.refuse(name, "a string, or a list of blocks")
    return objects(fields, name)


def _text(block: Fields) -> str:
    """The text of a block of text, or of a document that is text."""
    if block.given("type") == "document":
        source = Fields(block.mapping("source") or {}, block.name("source"))
        if source.given("type") != "text":
            source.refuse("type", "text; Lily reads text only")
        return source.text("data") or ""
    if block.given("type") != "text":
        block.refuse("type", "text; Lily reads text only")
    text = block.text("text")
    if text is None:
        block.refuse("text", "a string")
    return text


def _user(blocks: list[Fields]) -> list[Message]:
    """Results of tools are messages of their own, in the order of the blocks; the texts between them the user's."""
    messages: list[Message] = []
    for block in blocks:
        if block.given("type") == "tool_result":
            content = "\n".join(map(_text, _blocks(block, "content")))
            messages.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + _text(block)
        else:
            messages.append({"role": "user", "content": _text(block)})
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Fields]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.given("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            name = block.text("name")
            if not name:
                block.refuse("name", "the tool's name")
            function = {"name": name, "arguments": block.mapping("input") or {}}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind not in _SKIPPED:
            texts.append(_text(block))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


# ---- the reply
class MessagesReply(Reply):
    """A reply in the dialect's objects."""

    ordered = True
    closing = b""

    def __init__(self, head: Head, request: Request, token_bytes: Callable[[int], bytes]) -> None:
        self._head = head
        self._blocks = Blocks()
        self._content: list[dict[str, Any]] = []  # blocks that are complete

    def begin(self, prompt: Progress) -> Iterator[dict[str, Any]]:
        """The message, with the tokens of the prompt."""
        cached, tokens = prompt or (0, 0)
        usage = {**_read_tokens(tokens, cached), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._message([]), "usage": usage}}

    def alive(self, progress: Progress) -> Iterator[dict[str, Any]]:
        """The dialect's own sign of life."""
        yield {"type": "ping"}

    def push(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk; with the end come the last ones."""
        for step, block, text in self._blocks.push(chunk):
            if step is Step.BEGIN:
                yield {"type": "content_block_start", "index": block.index, "content_block": _begun(block)}
            elif step is Step.GROW:
                yield _delta(block, _GROWTH[block.kind], text)
            else:
                if block.kind == "reasoning":
                    yield _delta(block, ("signature_delta", "signature"), _signature(block.text))
                yield {"type": "content_block_stop", "index": block.index}
                if block.complete:
                    self._content.append(_whole(block))
        if (reply := chunk.completion) is not None:
            yield {"type": "message_delta", "delta": _ended(reply), "usage": _usage(reply)}
            yield {"type": "message_stop"}

    def whole(self, reply: Completion) -> dict[str, Any]:
        """The message at its end."""
        return {**self._message(self._content), **_ended(reply), "usage": _usage(reply)}

    def failed(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """What went wrong, in the dialect's own shape."""
        yield error.anthropic_body

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id, "type": "message", "role": "assistant", "model": self._head.model, "content": content,
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip


_GROWTH = {
    "reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _delta(block: Block, kind: tuple[str, str], text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind[0], kind[1]: text}}


def _begun(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {**_begun(block), "input": json.loads(block.text)}
    if block.kind == "reasoning":
        return {**_begun(block), "thinking": block.text, "signature": _signature(block.text)}
    return {**_begun(block), "text": block.text}


def _signature(thinking: str) -> str:
    """Clients keep thinking only with a signature; nobody has to check ours."""
    return blake2b(thinking.encode(), digest_size=24).hexdigest()


def _ended(reply: Completion) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = reasons[reply.finish_reason] if reply.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop}


def _read_tokens(tokens: int, cached: int) -> dict[str, int]:
    """As Anthropic counts: what comes from the cache is not among the ``input_tokens``."""
    return {
        "input_tokens": tokens - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
    }  # fmt: skip


def _usage(reply: Completion) -> dict[str, int]:
    return {**_read_tokens(reply.prompt_tokens, reply.cached_tokens), "output_tokens": reply.completion_tokens}
