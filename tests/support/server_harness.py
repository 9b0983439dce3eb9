# SPDX-License-Identifier: Apache-2.0
"""A server on a free port of this machine, in a thread; requests to it by the official client, httpx, or bare sockets.

Not handled: the command and its signals (cli_harness.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import httpx
import openai
from waiting import PATIENCE, until

from lily.engine import Engine
from lily.server import app as app_module
from lily.server.app import App
from lily.server.requests import open_stream
from lily.server.serving import Server, bind
from lily.server.settings import Settings

HI = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}


def open_tiny(**options: Any) -> Engine:
    """lily-tiny on one thread of the cpu device."""
    return Engine(device="cpu", threads=1, **{"max_context": 1024, **options})


@dataclass
class Running:
    """A server that answers."""

    app: App
    server: Server
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The official client, which never tries again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.http.request(method, path, **options)

    def chat(self, body: Any = None, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": HI, **(body or {}), **fields})

    def connect(self, path: str, *, receive_buffer: int | None = None, **fields: Any) -> socket.socket:
        """A bare connection on which a request was sent."""
        body = json.dumps({"stream": True, **fields}).encode()
        connection = socket.socket()
        connection.settimeout(PATIENCE)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def is_free(self) -> None:
        """Waits until no request runs or waits."""
        until(lambda: self.app.requests == 0, "no request is left")

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def serving(
    engine: Engine, reopen: Callable[[], Engine] | None = None, *, send_buffer: int | None = None, **settings: Any
) -> Iterator[Running]:
    """A server for ``engine``, which it leaves open. send_buffer: bytes of a reply that the system holds, about."""
    app = App(engine, Settings(**{"model": "tiny", **settings}), reopen)
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(app, ready.set)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    running = Running(app, server, port, thread)
    try:
        assert ready.wait(PATIENCE)
        yield running
    finally:
        running.stop()
        running.is_free()
        bound.close()


def read_until(connection: socket.socket, found: bytes) -> bytes:
    """What comes until ``found`` is part of it, or the connection ends."""
    data = b""
    while found not in data and (part := connection.recv(65536)):
        data += part
    return data


def read_all(connection: socket.socket) -> bytes:
    """What comes until the connection ends."""
    return read_until(connection, b"\0 never")


def body_of(data: bytes) -> str:
    """The body of a response in chunks, put together."""
    _, _, rest = data.partition(b"\r\n\r\n")
    text = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return text.decode()


async def send(
    port: int, path: str, data: bytes, *, length: int | None = None, receive_buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection on which a request was sent; ``length``: of the body, as its head has it."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    limit = 1 << 16 if receive_buffer is None else receive_buffer
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data)
    return reader, writer


async def exchange(port: int, path: str, body: Any) -> tuple[int, str]:
    """Status and body of the response to one request, on a bare connection of its own."""
    reader, writer = await send(port, path, body if isinstance(body, bytes) else json.dumps(body).encode())
    got = await reader.read()
    writer.close()
    whole = got.partition(b"\r\n\r\n")[2].decode() if b"\r\ncontent-length: " in got else body_of(got)
    return int(got.split(b" ", 2)[1]), whole


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of events, which has to end with ``[DONE]``."""
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


class Gate:
    """Holds requests before they reach the engine; ``open`` lets all go on."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = 0

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self.reached += 1
        assert self._open.wait(PATIENCE)


@contextmanager
def gated(*, in_prompt: bool = False) -> Iterator[Gate]:
    """Requests wait at a gate before they are asked of the engine; or, ``in_prompt``, before its prompt is read."""
    gate = Gate()

    def before(engine: Any, request: Any, on_prompt: Any) -> Any:
        gate.wait()
        return open_stream(engine, request, on_prompt)

    def within(engine: Any, request: Any, on_prompt: Callable[[int, int], None]) -> Any:
        def note(done: int, total: int) -> None:
            on_prompt(done, total)
            if done < total:
                gate.wait()

        return open_stream(engine, request, note)

    with mock.patch.object(app_module, "open_stream", within if in_prompt else before):
        try:
            yield gate
        finally:
            gate.open()
