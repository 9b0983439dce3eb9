# SPDX-License-Identifier: Apache-2.0
"""Reasoning and calls of tools through the whole server: the model's tokens are given, everything after them is real.

lily-tiny calls no tools by itself.  Not handled: every form of a call (the tests of the parser).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import CALL, TOOLS, writing
from server_harness import HI, Running

from lily.engine import Engine


def ask(server: Running, **how: Any) -> Any:
    how = {"tools": TOOLS, "extra_body": {"ignore_eos": True}, **how}
    return server.openai.chat.completions.create(model="any", messages=HI, seed=1, **how)  # type: ignore[arg-type]


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        message["content"] += choice.delta.content or ""
        message["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
        for part in choice.delta.tool_calls or ():
            call = message["calls"].setdefault(part.index, {"name": "", "arguments": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
            assert (part.id is not None) == (part.function.name is not None)
        message["finish"] = choice.finish_reason
    return message


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("content", ["", "I look up."])
def test_calls_and_reasoning_are_the_same_streamed_and_whole(
    server: Running, engine: Engine, count: int, content: str
) -> None:
    calls = "\n".join(CALL.format(where) for where in ("the sky", "x < y & z")[:count])
    text = "Hm.\n</think>\n\n" + content + ("\n\n" if content and calls else "") + calls
    with writing(engine, text):
        choice = ask(server).choices[0]
        streamed = put_together(list(ask(server, stream=True)))
    assert choice.message.model_extra["reasoning_content"] == streamed["reasoning"] == "Hm."
    assert (choice.message.content or "") == streamed["content"]
    assert streamed["content"].strip() == content
    assert choice.finish_reason == streamed["finish"] == ("tool_calls" if count else "stop")
    whole = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or ()]
    assert whole == list(streamed["calls"].values())
    assert [(c["name"], json.loads(c["arguments"])) for c in whole] == [
        ("look", {"at": where, "times": 2}) for where in ("the sky", "x < y & z")[:count]
    ]


def test_a_call_that_is_cut_off_is_none(server: Running, engine: Engine) -> None:
    text = "</think>\n\n" + CALL.format("the sky")
    with writing(engine, text, end=False):
        choice = ask(server, max_tokens=len(engine.tokenizer.encode(text)) - 12).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_without_tools_what_looks_like_a_call_is_content(server: Running, engine: Engine) -> None:
    with writing(engine, "</think>\n\n" + CALL.format("the sky")):
        for how in ({"tools": []}, {"tool_choice": "none"}):
            choice = ask(server, **how).choices[0]
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
            assert "<function=look>" in choice.message.content


def test_a_reply_that_ends_while_it_thinks_has_empty_content(server: Running, engine: Engine) -> None:
    with writing(engine, "Hm, let me see", end=False):
        choice = ask(server, max_tokens=2).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.model_extra["reasoning_content"]
