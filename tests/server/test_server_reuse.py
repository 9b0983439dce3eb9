# SPDX-License-Identifier: Apache-2.0
"""What a request leaves for the next one, however it has ended: each ending leaves what was read.

Not handled: which bits reuse gives (test_engine_exact.py); who gives way (test_residents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from answers import CHAT
from scripted import CALL, TOOLS, writing
from server_harness import HI, Running, open_tiny, read_until, serving

from lily.engine import Engine

LONG = [{"role": "user", "content": "a cat sees a bird " * 20}]
NEXT = {"role": "user", "content": "Go on."}


@pytest.fixture
def fresh() -> Iterator[tuple[Engine, Running]]:
    """A server that nobody has asked."""
    with open_tiny() as engine, serving(engine) as server:
        yield engine, server


def stopped(engine: Engine, server: Running, ask: dict[str, Any]) -> list[Any]:
    with writing(engine, "Hm.\n</think>\n\nYes."):
        return _goes_on(server.chat(ask), "stop")


def stopped_by_a_string(engine: Engine, server: Running, ask: dict[str, Any]) -> list[Any]:
    with writing(engine, "Hm.\n</think>\n\nYes, of course."):
        return _goes_on(server.chat(ask, stop=","), "stop")


def cut(engine: Engine, server: Running, ask: dict[str, Any]) -> list[Any]:
    return _goes_on(server.chat(ask, max_tokens=5, ignore_eos=True), "length")


def called(engine: Engine, server: Running, ask: dict[str, Any]) -> list[Any]:
    with writing(engine, "Hm.\n</think>\n\n" + CALL.format("the sky")):
        messages = _goes_on(server.chat(ask), "tool_calls")
    return [*messages[:-1], {"role": "tool", "tool_call_id": messages[-2]["tool_calls"][0]["id"], "content": "blue"}]


def left(engine: Engine, server: Running, ask: dict[str, Any]) -> list[Any]:
    with server.connect(CHAT, **ask, ignore_eos=True) as connection:
        read_until(connection, b'"reasoning_content":')
    server.is_free()
    return [*LONG, NEXT]


def _goes_on(response: Any, reason: str) -> list[Any]:
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == reason
    return [*LONG, choice["message"], NEXT]


@pytest.mark.parametrize("end", [stopped, stopped_by_a_string, cut, called, left])
def test_every_ending_leaves_the_prompt_for_the_next_turn(
    fresh: tuple[Engine, Running], end: Callable[[Engine, Running, dict[str, Any]], list[Any]]
) -> None:
    engine, server = fresh
    ask = {"messages": LONG, "seed": 1, "tools": TOOLS}
    messages = end(engine, server, ask)
    usage = server.chat({**ask, "messages": messages}, max_tokens=1).json()["usage"]
    first = len(engine.render_chat(LONG, tools=TOOLS))
    start_of_reply = len(engine.tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first - start_of_reply
    assert usage["prompt_tokens"] > first


def test_the_same_prompt_twice_keeps_one_token_to_run(fresh: tuple[Engine, Running]) -> None:
    _, server = fresh
    replies = [server.chat({"messages": HI}, seed=3, max_tokens=8).json() for _ in range(2)]
    assert replies[0]["choices"] == replies[1]["choices"]
    usage = replies[1]["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
