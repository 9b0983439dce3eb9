# SPDX-License-Identifier: Apache-2.0
"""What a request must be before anything reads it: from an allowed host and page, with the key, as JSON, not too long.

A web page that a browser shows can send requests to this machine.  It cannot choose the Host header, which names the
page's own server even if that name leads here; and it cannot send JSON to another origin without asking first.
Not handled: TLS, several keys, limits on the rate of requests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lily.errors import show
from lily.server.errors import RequestError
from lily.server.page import FILES
from lily.server.settings import Settings

OPEN_PATHS = frozenset({"/health", *FILES})
"""What needs no key: the page asks for it where it needs one itself."""

_METHODS, _PREFLIGHT_SECONDS = "GET, POST", "600"


class Guards:
    """Lets through to ``app`` what may pass; everything else is answered here."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._key = None if settings.key is None else settings.key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a websocket, which the server is told not to speak
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers, scope)
            origin = self._allowed_origin(headers)
            if origin is not None:
                send = _with_origin(send, origin)
            if scope["method"] == "OPTIONS":
                await _preflight(origin)(scope, receive, send)
                return
            self._check_key(headers, scope["path"])
        except RequestError as error:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        name = host_name(headers.get("host", ""))
        here = scope.get("server") or ("", 0)
        if is_loopback(name) or name in self._settings.hosts or (name and name == here[0]):
            return
        raise RequestError(
            403, f"the Host header names {show(name)}; allowed: this machine's own names. Start the server with "
            "--allowed-hosts NAME to allow another", code="host_not_allowed",
        )  # fmt: skip

    def _allowed_origin(self, headers: Headers) -> str | None:
        """The page to which the response must be opened; None if no page asks, or one of this server's own."""
        origin = headers.get("origin")
        if origin is None:
            return None
        if origin in self._settings.origins or "*" in self._settings.origins:
            return origin
        if origin.partition("://")[2] == headers.get("host"):
            return None
        raise RequestError(
            403, f"the web page {show(origin)} may not use this server; start it with --allowed-origins ORIGIN to "
            "allow one", code="origin_not_allowed",
        )  # fmt: skip

    def _check_key(self, headers: Headers, path: str) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Header values come as latin-1; in bytes the comparison takes as long whatever they are.
        if not hmac.compare_digest(shown.encode("latin-1"), self._key):
            raise RequestError(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


def refusal(error: RequestError, path: str) -> Response:
    """The response that says what is wrong, in the shape of the dialect that speaks at ``path``.

    What is left of the request is not read, so the connection ends.
    """
    headers = {**error.headers, "Connection": "close"} if error.status in (408, 413) else error.headers
    body = error.anthropic_body if path.startswith("/v1/messages") else error.body
    return JSONResponse(body, status_code=error.status, headers=headers)


def is_loopback(name: str) -> bool:
    """Whether a host name or address means this machine, and reaches it from nowhere else."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def host_name(header: str) -> str:
    """The host of a Host header, without port and brackets, in lower case; "" if it is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a JSON request. RequestError: it is no JSON, too long (413), or does not come in time (408)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        seen = show(kind) if kind else "missing"
        raise RequestError(415, f"Content-Type is {seen}; allowed: application/json")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_long(limit)
                parts.append(part)
    except TimeoutError:
        raise RequestError(408, f"the request did not come within {seconds:g} seconds; send it again") from None
    except ClientDisconnect:
        raise RequestError(400, "the client went before its request was complete") from None
    return b"".join(parts)


def _too_long(limit: int) -> RequestError:
    return RequestError(413, f"the request is longer than {limit:,} bytes; shorten it")


def _preflight(origin: str | None) -> Response:
    """Tells a browser which requests the page may send."""
    if origin is None:
        return Response(status_code=204, headers={"Allow": _METHODS})
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": "authorization, content-type, x-api-key, anthropic-version, anthropic-beta",
        "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
    }
    return Response(status_code=204, headers=headers)


def _with_origin(send: Send, origin: str) -> Send:
    """Responses, refusals too, that the page may read."""

    async def opened(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Vary"] = "Origin"
        await send(message)

    return opened


def normalised_hosts(names: Iterable[str]) -> frozenset[str]:
    """Names as ``host_name`` gives them."""
    return frozenset(host_name(f"[{name.strip('[]')}]" if name.count(":") > 1 else name) for name in names)
