# SPDX-License-Identifier: Apache-2.0
"""Streams on bare connections: signs of life, clients that go, clients that stop reading, a server that stops.

What must happen is waited for; how long it takes decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from server_harness import HI, Running, body_of, events, gated, open_tiny, read_all, read_until, serving
from waiting import PATIENCE, until

from lily.engine import Engine
from lily.policy import POLICIES
from lily.run.reply import Reply
from lily.run.runner import Runner
from lily.server.app import App
from lily.server.relay import GONE, STALLED, Relay
from lily.server.settings import Settings
from lily.streaming import StreamChunk

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": HI, "ignore_eos": True, "seed": 1}
SHORT: dict[str, Any] = {"messages": HI, "seed": 1, "max_tokens": 8}


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[Engine]:
    """An engine that reads prompts in pieces of 16 tokens."""
    with mock.patch.dict(POLICIES, cpu=replace(POLICIES["cpu"], chunks=((0, 16),), buckets=(8, 16))):
        engine = open_tiny()
    with engine:
        yield engine


def test_a_bare_stream_has_events_and_an_end(server: Running) -> None:
    with server.connect(CHAT, **SHORT) as connection:
        data = read_until(connection, b"[DONE]")
    head, _, _ = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-store" in head
    whole = server.chat(SHORT).json()["choices"][0]["message"]["content"]
    got = [c["delta"].get("content", "") for e in events(server.chat(SHORT, stream=True).text) for c in e["choices"]]
    assert "".join(got) == whole


def test_a_stream_that_waits_for_the_engine_shows_signs_of_life(engine: Engine) -> None:
    with serving(engine, keep_alive=0.01) as server, gated() as gate:
        with server.connect(CHAT, **SHORT) as connection:
            data = read_until(connection, b": waiting for the engine\n\n")
            assert data.startswith(b"HTTP/1.1 200 ")
            gate.open()
            data = read_until(connection, b"[DONE]")
        assert b'"content":' in data


def test_a_stream_whose_prompt_is_read_says_how_far(small_chunks: Engine) -> None:
    prompt = [{"role": "user", "content": "far " * 60}]  # of which no other test has left a beginning
    total = len(small_chunks.render_chat(prompt))
    with serving(small_chunks, keep_alive=0.01) as server, gated(in_prompt=True) as gate:
        connection = server.connect(CHAT, **{**SHORT, "messages": prompt})
        with connection:
            assert b": 0 of %d tokens of the prompt are read\n\n" % total in read_until(connection, b"are read")
            gate.open()
            read_until(connection, b"[DONE]")


def test_a_client_that_goes_ends_its_reply(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lily.server")
    before, allowed, held, gone = Reply.next, threading.Semaphore(4), threading.Event(), threading.Event()
    after: list[Reply] = []

    def step(reply: Reply) -> Any:
        """A few steps of decode; the next one waits until the client has gone, and those after it are counted."""
        if gone.is_set():
            after.append(reply)
        elif not allowed.acquire(blocking=False):
            held.set()
            assert gone.wait(PATIENCE)
        return before(reply)

    with mock.patch.object(Reply, "next", step):
        connection = server.connect(CHAT, **LONG)
        read_until(connection, b'"content":"')
        assert held.wait(PATIENCE)
        connection.close()
        until(lambda: [r.ended for r in server.app._relays] == [GONE], "it was noticed")
        gone.set()
        server.is_free()
    assert after == []
    until(lambda: f"{CHAT}: {GONE}" in caplog.text.replace("'", ""), "the log says so")
    assert server.chat(SHORT).status_code == 200


def test_a_client_that_goes_while_its_prompt_is_read_ends_the_reading(small_chunks: Engine) -> None:
    prompt = [{"role": "user", "content": "word " * 400}]
    chunks: list[int] = []
    before, first, go_on = Runner.prefill, threading.Event(), threading.Event()

    def gate(runner: Runner, sequence: Any, tokens: Any, *rest: Any) -> Any:
        chunks.append(len(tokens))
        first.set()
        assert go_on.wait(PATIENCE)
        return before(runner, sequence, tokens, *rest)

    with serving(small_chunks) as server, mock.patch.object(Runner, "prefill", gate):
        connection = server.connect(CHAT, **{**SHORT, "messages": prompt})
        assert first.wait(PATIENCE)
        connection.close()
        until(lambda: [r.ended for r in server.app._relays] == [GONE], "it was noticed")
        go_on.set()
        server.is_free()
        assert len(chunks) == 1
        assert server.chat(SHORT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_it_waits_costs_no_work(engine: Engine, stream: bool) -> None:
    with serving(engine) as server, gated() as gate, mock.patch.object(Runner, "start") as start:
        connection = server.connect(CHAT, **SHORT, **({} if stream else {"stream": False}))
        until(lambda: gate.reached == 1, "it waits")
        connection.close()
        until(lambda: [r.ended for r in server.app._relays] == [GONE], "it was noticed")
        gate.open()
        server.is_free()
        assert not start.called


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_its_reply(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection takes nothing from the second part on: the loop that sends waits, the others do not."""
    caplog.set_level("INFO", "lily.server")
    app = App(engine, Settings("tiny", request_timeout=0.1))
    parts: list[dict[str, Any]] = []
    forever = asyncio.Event()

    async def request() -> None:
        body = json.dumps({**LONG, "stream": True}).encode()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            message = next(given, None)
            if message is None:
                await forever.wait()
            return message

        async def send(message: Any) -> None:
            parts.append(message)
            if len(parts) > 2:
                await forever.wait()

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "server": ("127.0.0.1", 1),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), PATIENCE)

    asyncio.run(request())
    until(lambda: app.requests == 0, "its reply has ended")
    assert f"{CHAT}: {STALLED}" in caplog.text.replace("'", "")
    assert engine.chat(HI, max_tokens=2).completion_tokens == 2


def test_a_connection_that_nobody_reads_from_is_not_kept(engine: Engine) -> None:
    """What was written to it would lie there for ever, and be waited for when the server stops."""
    with serving(engine, request_timeout=0.1, send_buffer=4096) as server:
        body = {**LONG, "logprobs": True, "top_logprobs": 20}
        with server.connect(CHAT, receive_buffer=4096, **body):
            until(lambda: 'outcome="stalled"' in server.get("/metrics").text, "its reply was given up")
            until(lambda: len(server.server.server_state.connections) == 1, "there is only the one that asked for that")


class Endless:
    """A reply that has always one more chunk, or nearly so."""

    def __init__(self) -> None:
        self.taken, self.cancelled = 0, False

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True

    def __iter__(self) -> Iterator[StreamChunk]:
        while not self.cancelled and self.taken < 1000:
            self.taken += 1
            yield StreamChunk("a")


def test_what_lies_between_engine_and_client_is_bounded() -> None:
    async def stalled() -> tuple[Endless, Relay]:
        relay, stream = Relay(0.05, room=3), Endless()
        await asyncio.to_thread(relay.run, lambda _: stream)
        return stream, relay

    stream, relay = asyncio.run(stalled())
    assert stream.taken == 4  # the last of them found no room
    assert (stream.cancelled, relay.ended) == (True, STALLED)


def test_a_reader_gets_everything_in_order_and_then_the_end() -> None:
    async def read() -> list[str]:
        relay = Relay(PATIENCE, room=2)
        stream = [StreamChunk(str(n)) for n in range(20)]

        class Stream(Endless):
            def __iter__(self) -> Iterator[StreamChunk]:
                return iter(stream)

        work = asyncio.create_task(asyncio.to_thread(relay.run, lambda _: Stream()))
        got = []
        while (chunk := await relay.next()) is not None:
            got.append(chunk.text)
        assert await relay.next() is None
        await work
        return got

    assert asyncio.run(read()) == [str(n) for n in range(20)]


def test_the_first_reason_for_an_end_counts() -> None:
    async def cancel() -> Relay:
        relay = Relay(1)
        relay.cancel(GONE)
        relay.cancel(STALLED)
        relay.run(lambda _: pytest.fail("it was cancelled before"))
        assert await relay.next() is None
        return relay

    assert asyncio.run(cancel()).ended == GONE


def test_a_server_that_stops_says_so_to_streams_and_takes_nothing_more(engine: Engine) -> None:
    with serving(engine) as server, server.connect(CHAT, **LONG) as connection:
        data = read_until(connection, b'"content":"')
        server.stop()
        data += read_all(connection)
    last = [line for line in body_of(data).split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert server.app.stopping
    with serving(engine) as server:
        server.app.stop()
        assert server.get("/health").json() == {"status": "stopping", "requests": 0}
        assert server.chat(SHORT).status_code == 503
