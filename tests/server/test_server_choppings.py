# SPDX-License-Identifier: Apache-2.0
"""A reply is the same in every dialect, in one piece and streamed, wherever its tokens begin and end.

What it comes to is written beside it.  Not handled: every slip in a call (test_reply_parts.py, test_server_fuzz.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Answer, received
from reply_cases import chopped
from scripted import CALL, TOOLS, writing
from server_harness import HI, Running

from lily.engine import Engine


@dataclass
class Case:
    """What the model writes, and what a client has of it. cut: it does not end its reply."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = "stop"
    stop: tuple[str, ...] = ()
    cut: bool = False


SKY, SEA = ("look", {"at": "the sky", "times": 2}), ("look", {"at": "x < y & é", "times": 2})
CALLS = f"{CALL.format(SKY[1]['at'])}\n{CALL.format(SEA[1]['at'])}"
CASES = {
    "characters of many bytes": Case("Hm, 日本.\n</think>\n\nIt is é😀 blue.", "Hm, 日本.", "It is é😀 blue."),
    "calls": Case(f"Hm.\n</think>\n\nI look.\n\n{CALLS}", "Hm.", "I look.", [SKY, SEA], "tool_calls"),
    "calls alone": Case(f"</think>\n\n{CALLS}", "", "", [SKY, SEA], "tool_calls"),
    "text behind a call": Case(
        f"</think>\n\n{CALL.format(SKY[1]['at'])}\n\nAnd so.", "", "And so.", [SKY], "tool_calls"
    ),
    "a stop string": Case("Hm.\n</think>\n\nIt is blue. No more.", "Hm.", "It is bl", stop=("more", "ue. N")),
    "a stop string at the beginning": Case("</think>\n\nIt is blue.", "", "", stop=("It",)),
    "no stop string in reasoning and calls": Case(
        f"No sky.\n</think>\n\nI look.\n\n{CALLS}", "No sky.", "I look.", [SKY, SEA], "tool_calls", stop=("sky",)
    ),
    "a tag that is mentioned": Case(
        "Hm.\n</think>\n\nWrite <function=look> and </parameter> so.", "Hm.",
        "Write <function=look> and </parameter> so.",
    ),
    "a call that is cut off": Case(
        f"</think>\n\nI look.\n\n{CALLS[:-25]}", "", "I look.", [SKY], "length", cut=True
    ),
    "content that is cut off": Case("</think>\n\nIt is blu", "", "It is blu", reason="length", cut=True),
    "reasoning that is cut off": Case("Hm, let me", "Hm, let me", "", reason="length", cut=True),
}  # fmt: skip
_FUNCTION = TOOLS[0]["function"]


def body(path: str, case: Case, tokens: int) -> dict[str, Any]:
    most = tokens if case.cut else 400
    stop = list(case.stop) or None
    if path == MESSAGES:
        tools = [{"name": _FUNCTION["name"], "input_schema": _FUNCTION["parameters"]}]
        thinking = {"type": "adaptive"}
        return {"messages": HI, "tools": tools, "thinking": thinking, "max_tokens": most, "stop_sequences": stop}
    if path == RESPONSES:
        tools = [{"type": "function", **_FUNCTION}]
        return {"input": HI, "tools": tools, "max_output_tokens": most, "stop": stop}
    asked = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": HI, "tools": TOOLS}
    return {**asked, "max_tokens": most, "stop": stop, "stream_options": {"include_usage": True}}


def pieces(text: str, chopping: int) -> list[str]:
    """As the tokenizer cuts it (0), a character at a time (1), or at drawn places."""
    draw = random.Random(chopping)
    drawn = draw.sample(range(len(text)), draw.randint(1, len(text)))
    return chopped(text, ([], range(len(text)), drawn)[min(chopping, 2)], spelled=False)


CHOPPINGS = [1, 2, *(pytest.param(number, marks=pytest.mark.full) for number in (0, *range(3, 20)))]


@pytest.mark.parametrize("chopping", CHOPPINGS)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("name", CASES)
def test_a_chat_comes_to_the_same(server: Running, engine: Engine, name: str, path: str, chopping: int) -> None:
    case = CASES[name]
    parts = pieces(case.text, chopping)
    tokens = sum(len(engine.tokenizer.encode(part)) for part in parts)
    answers = []
    with writing(engine, parts, end=not case.cut):
        for stream in (False, True):
            response = server.post(path, {**body(path, case, tokens), "stream": stream})
            answers.append(received(path, response.text, stream=stream))
    got = answers[0]
    assert (got.reasoning, got.text, got.calls, got.reason) == (case.reasoning, case.content, case.calls, case.reason)
    assert answers[1] == got
    assert case.stop or got.tokens == tokens + (not case.cut)


@pytest.mark.parametrize("chopping", CHOPPINGS)
@pytest.mark.parametrize("stop", [(), ("more", "ue. N"), ("It",)])
def test_a_text_comes_to_the_same(server: Running, engine: Engine, stop: tuple[str, ...], chopping: int) -> None:
    text = "It is é😀 blue. No more."
    ends = [text.index(one) for one in stop]
    case = Case(text, "", text[: min(ends, default=None)], stop=stop)
    answers: list[Answer] = []
    with writing(engine, pieces(text, chopping)):
        for stream in (False, True):
            response = server.post(COMPLETIONS, {**body(COMPLETIONS, case, 0), "stream": stream})
            answers.append(received(COMPLETIONS, response.text, stream=stream))
    assert (answers[0].text, answers[0].reason) == (case.content, "stop")
    assert answers[1] == answers[0]
