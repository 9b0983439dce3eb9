# SPDX-License-Identifier: Apache-2.0
"""The application on a socket: bound before the model is loaded, listening after it, stopped by a signal.

While no request comes nothing wakes the process.
Not handled: TLS, several processes, sockets of the file system.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lily.errors import LilyError
from lily.server.app import App
from lily.server.guards import is_loopback

GRACE = 10
"""Seconds that the last parts of replies may take on their way once the server stops."""

IDLE = 75
"""Seconds after which a connection without requests is closed; agents pause for longer than libraries expect."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address, not listening yet. port: 0 is any free one. LilyError: it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise LilyError(f"--host {host!r} is no address of this machine: {error}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise LilyError(f"{host} port {port} cannot be bound: {error.strerror}; choose another --port") from None
    return bound


def is_exposed(bound: socket.socket) -> bool:
    """Whether other machines reach the socket."""
    return not is_loopback(str(bound.getsockname()[0]))


def url(bound: socket.socket, host: str) -> str:
    """Where this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(bound.getsockname()[0]), host)
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


class Connection(H11Protocol):
    """A connection that ends with a response that was given up: what lies there unsent would wait for ever."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._answer, self.app = self.app, self._answer_or_end

    async def _answer_or_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        await self._answer(scope, receive, send)
        if not cycle.response_complete:
            self.transport.abort()
            await asyncio.sleep(0)  # until the loop has said that the connection is lost


class Server(uvicorn.Server):
    """Serves ``app`` on a bound socket until a signal comes, or ``should_exit`` is set.

    ready: called when it listens. interrupted: whether Ctrl-C has ended it.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # while it waits for the end
    _exit = False

    def __init__(self, app: App, ready: Callable[[], object] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                _dated(app), http=Connection, ws="none", loop="asyncio", lifespan="off", interface="asgi3",
                log_config=None, access_log=False, proxy_headers=False, server_header=False, date_header=False,
                timeout_graceful_shutdown=GRACE, timeout_keep_alive=IDLE,
            )
        )  # fmt: skip
        self.app, self._ready = app, ready
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        self._ready()

    @property
    def should_exit(self) -> bool:
        """Whether it is to end; may be set in any thread."""
        return self._exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._exit = value
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended just now
                self._loop.call_soon_threadsafe(self._changed.set)

    async def main_loop(self) -> None:
        """Waits for the end; uvicorn's own looks for it ten times a second."""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not self.should_exit:
            await self._changed.wait()
            self._changed.clear()
        self._loop = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends every reply, then the connections."""
        self.app.stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the server, not the process: what owns the engine closes it.

        They wake the event loop, whichever thread the system gives them to.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.handle_exit(number, None)  # a second Ctrl-C waits for nobody


def _dated(app: ASGIApp) -> ASGIApp:
    """``app`` with the time in every response; uvicorn keeps it ready, and wakes for that every second."""

    async def dated(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = (b"date", formatdate(usegmt=True).encode())
                message = {**message, "headers": [*message["headers"], date]}
            await send(message)

        await app(scope, receive, send_dated)

    return dated


def serve(app: App, bound: socket.socket, ready: Callable[[], object]) -> None:
    """Serves until a signal comes. KeyboardInterrupt: that was Ctrl-C."""
    server = Server(app, ready)
    asyncio.run(server.serve(sockets=[bound]))
    if server.interrupted:
        raise KeyboardInterrupt
