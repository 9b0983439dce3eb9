# SPDX-License-Identifier: Apache-2.0
"""32 clients at once, in every dialect: each has the answer that it would have alone, and nobody is sent away.

Not handled: clients that break off, or ask for what cannot be (test_server_soak.py).
"""

from __future__ import annotations

import asyncio

import pytest
from answers import CHAT, Answer, received
from asks import Ask, answers_alone, ask
from server_harness import HI, Running, exchange, gated, serving
from waiting import PATIENCE, until

from lily.engine import Engine

CLIENTS = 32


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """What an engine answers to each request by itself."""
    return answers_alone(map(ask, range(CLIENTS)))


async def answers(server: Running, asks: list[Ask]) -> list[Answer]:
    """All at once."""

    async def answer(one: Ask) -> Answer:
        status, body = await asyncio.wait_for(exchange(server.port, one.path, one.body), PATIENCE)
        assert status == 200, body
        return received(one.path, body, stream=one.stream)

    return await asyncio.gather(*map(answer, asks))


def test_requests_differ_in_all_that_can_be_asked(alone: list[Answer]) -> None:
    """What the test below compares is no list of like things."""
    assert len({(answer.reasoning, answer.text, str(answer.calls)) for answer in alone}) > CLIENTS * 0.8
    assert {answer.reason for answer in alone} == {"stop", "length", "tool_calls"}
    assert sum(bool(answer.reasoning) for answer in alone) > 4
    assert max(answer.prompt_tokens for answer in alone) > 10 * min(answer.prompt_tokens for answer in alone)


def test_many_clients_get_the_answers_that_each_would_get_alone(engine: Engine, alone: list[Answer]) -> None:
    assert engine.sequences == 4
    with serving(engine) as server:
        for first in (0, 7):  # in another order the second time, when much of it is there already
            order = [*range(first, CLIENTS), *range(first)]
            got = asyncio.run(answers(server, [ask(number) for number in order]))
            assert dict(zip(order, got, strict=True)) == dict(enumerate(alone))


def test_sixteen_requests_may_wait_while_as_many_run_as_there_are_sequences(engine: Engine) -> None:
    body = {"messages": HI, "max_tokens": 1}
    with serving(engine, queue=16) as server, gated() as gate:

        async def all_at_once() -> list[int]:
            sent = [asyncio.create_task(exchange(server.port, CHAT, body)) for _ in range(engine.sequences + 16)]

            def settled() -> bool:
                return gate.reached == len(sent) or any(task.done() for task in sent)

            await asyncio.to_thread(until, settled, "all of them are taken in, or one is sent away")
            refused, _ = await exchange(server.port, CHAT, body)
            gate.open()
            return [refused, *(status for status, _ in await asyncio.gather(*sent))]

        refused, *served = asyncio.run(all_at_once())
        assert (refused, set(served)) == (503, {200})
