# SPDX-License-Identifier: Apache-2.0
"""A reply on its way to the client: in one piece, or as server-sent events.

While nothing comes a stream shows signs of life.  A client that takes nothing for too long loses its reply.  Until the
first part of a stream is sent, a failure has a status of its own; from then on it is an event.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable

from starlette.types import Message, Receive, Scope, Send

from lily.errors import LilyError
from lily.server.errors import RequestError
from lily.server.guards import refusal
from lily.server.relay import STALLED, Relay
from lily.server.replies import Part, Reply
from lily.server.settings import Settings
from lily.streaming import Completion, StreamChunk

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Outgoing:
    """The response to one request."""

    def __init__(self, relay: Relay, send: Send, settings: Settings) -> None:
        self._relay, self._asgi_send, self._settings = relay, send, settings
        self._begun = False  # a part of a stream was sent

    async def whole(self, reply: Reply) -> list[Completion]:
        """Sends the reply, or all of several, in one piece. Raises what has ended it."""
        came: list[Completion | None] = []
        while (chunk := await self._relay.next()) is not None:
            if reply.ordered:
                deque(reply.push(chunk), maxlen=0)
            _add(came, chunk)
        done = _all_ended(came)
        body = json.dumps(reply.whole(done[-1]), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        return done

    async def stream(self, reply: Reply) -> list[Completion]:
        """Sends the reply, or one after the other, as it comes. Raises what has ended it."""
        came: list[Completion | None] = []
        spoken = False
        while (chunk := await self._next(reply)) is not None:
            if not spoken:
                spoken = True
                await self._parts(reply.begin(self._relay.prompt))
            await self._parts(reply.push(chunk))
            _add(came, chunk)
        done = _all_ended(came)
        await self._part(reply.closing, more=False)
        return done

    async def fail(self, error: RequestError, reply: Reply | None, scope: Scope, receive: Receive) -> None:
        """Tells the client what went wrong; ``reply`` is streamed, or None."""
        if reply is not None and (self._begun or reply.streams(error)):
            await self._part(b"".join(map(encoded, reply.failed(error))), more=False)
        else:
            await refusal(error, scope["path"])(scope, receive, self._send)

    async def _next(self, reply: Reply) -> StreamChunk | None:
        """The next chunk; until it is there, signs of life."""
        while True:
            try:
                return await self._relay.next(self._settings.keep_alive)
            except TimeoutError:
                await self._parts(reply.alive(self._relay.progress))

    async def _parts(self, parts: Iterable[Part]) -> None:
        data = b"".join(map(encoded, parts))
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


def encoded(part: Part) -> bytes:
    """A server-sent event, named if its object has a type; or a comment."""
    if isinstance(part, str):
        return f": {part}\n\n".encode()
    data = json.dumps(part, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {part['type']}\n" if "type" in part else ""
    return f"{name}data: {data}\n\n".encode()


def _add(done: list[Completion | None], chunk: StreamChunk) -> None:
    """Of the reply that is coming the last entry is its completion, None before its end."""
    if not done or done[-1] is not None:
        done.append(None)
    done[-1] = chunk.completion


def _all_ended(done: list[Completion | None]) -> list[Completion]:
    ended = [completion for completion in done if completion is not None]
    if not done or len(ended) < len(done):
        raise LilyError("the reply was cancelled before its end")
    return ended
