# SPDX-License-Identifier: Apache-2.0
"""A reply on its way to the client: in one piece, or as server-sent events.

While nothing comes a stream shows signs of life: comments, which say how far the prompt is read.  A client that takes
nothing for too long loses its reply.  Until the first part of a stream is sent, a failure has a status of its own; from
then on it is an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from lily.errors import LilyError
from lily.server.errors import RequestError
from lily.server.guards import refusal
from lily.server.relay import STALLED, Relay
from lily.server.settings import Settings
from lily.streaming import Completion, StreamChunk

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """What a dialect makes of a reply."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""

    def push(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk."""

    def whole(self, reply: Completion) -> dict[str, Any]:
        """The response that is not streamed."""


class Outgoing:
    """The response to one request."""

    def __init__(self, relay: Relay, send: Send, settings: Settings) -> None:
        self._relay, self._asgi_send, self._settings = relay, send, settings
        self._begun = False  # a part of a stream was sent

    async def whole(self, reply: Reply) -> Completion:
        """Sends the reply in one piece. Raises what has ended it."""
        completion = None
        while (chunk := await self._relay.next()) is not None:
            completion = chunk.completion
        done = _ended(completion)
        body = json.dumps(reply.whole(done), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        return done

    async def stream(self, reply: Reply) -> Completion:
        """Sends the reply as it comes. Raises what has ended it."""
        completion, spoken = None, False
        while (chunk := await self._next()) is not None:
            if not spoken:
                spoken = True
                await self._events(reply.begin())
            await self._events(reply.push(chunk))
            completion = chunk.completion
        done = _ended(completion)
        await self._part(_DONE, more=False)
        return done

    async def fail(self, error: RequestError, scope: Scope, receive: Receive) -> None:
        """Tells the client what went wrong."""
        if self._begun:
            await self._part(event(error.body), more=False)
        else:
            await refusal(error)(scope, receive, self._send)

    async def _next(self) -> StreamChunk | None:
        """The next chunk; until it is there, comments."""
        while True:
            try:
                return await self._relay.next(self._settings.keep_alive)
            except TimeoutError:
                await self._part(progress(self._relay.progress))

    async def _events(self, objects: Iterable[dict[str, Any]]) -> None:
        data = b"".join(map(event, objects))
        if data:
            await self._part(data)

    async def _part(self, data: bytes, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                await self._asgi_send(message)
        except TimeoutError:
            self._relay.cancel(STALLED)
            raise LilyError(STALLED) from None


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def progress(done: tuple[int, int] | None) -> bytes:
    """A comment that says how far the prompt is read. It is never empty, which some clients cannot take."""
    what = "waiting for the engine" if done is None else f"{done[0]} of {done[1]} tokens of the prompt are read"
    return f": {what}\n\n".encode()


def _ended(completion: Completion | None) -> Completion:
    if completion is None:
        raise LilyError("the reply was cancelled before its end")
    return completion
