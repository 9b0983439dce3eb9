# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: which path does what, and the life of a request from its body to its last byte.

Every reply is read by a thread of its own (``relay.py``), so that no client holds up the event loop or another client.
The engine decides who runs; how many wait for it is bounded here.
Not handled: several models, embeddings, images.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from lily.engine import Engine, OnPrompt
from lily.errors import show
from lily.run.residents import Slot
from lily.server.chat import ChatReply, read_chat
from lily.server.completions import CompletionReply, read_completion
from lily.server.counts import Head
from lily.server.errors import RequestError, as_request_error
from lily.server.fields import json_object
from lily.server.guards import Guards, read_body, refusal
from lily.server.messages import MessagesReply, read_messages
from lily.server.metrics import CONTENT_TYPE, Metrics, described_slots, props
from lily.server.on_demand import OnDemand
from lily.server.outgoing import Outgoing
from lily.server.page import FILES, page_file
from lily.server.relay import GONE, STALLED, STOPPING, Relay
from lily.server.replies import Reply
from lily.server.requests import Model, Request, branches, open_stream
from lily.server.responses import ResponsesReply, read_responses
from lily.server.settings import Settings
from lily.server.tokens import ANSWERS, Answer
from lily.streaming import Completion, Stream

LOG = logging.getLogger("lily.server")
_RETRY_SECONDS = 5

Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Dialect:
    """What one endpoint makes of a body and of a reply. prefix: of the ids of its responses; field: of its prompt."""

    prefix: str
    field: str
    read: Callable[[Mapping[str, Any], Model], Request]
    reply: Callable[[Head, Request, Callable[[int], bytes]], Reply]


DIALECTS = {
    "/v1/chat/completions": Dialect("chatcmpl-", "messages", read_chat, ChatReply),
    "/v1/responses": Dialect("resp_", "input", read_responses, ResponsesReply),
    "/v1/messages": Dialect("msg_", "messages", read_messages, MessagesReply),
    "/v1/completions": Dialect("cmpl-", "prompt", read_completion, CompletionReply),
}


class App:
    """An engine as an ASGI application. ``stop`` ends all replies, ``close`` the engine.

    reopen: makes an engine like it, for one that is unloaded while nobody asks (``Settings.idle_unload``).
    """

    def __init__(self, engine: Engine, settings: Settings, reopen: Callable[[], Engine] | None = None) -> None:
        self.settings = settings
        self._engines = OnDemand(engine, reopen, settings.idle_unload)
        self.stopping = False
        self._model = Model.of(engine, settings)
        self._created = int(time.time())
        self._relays: set[Relay] = set()  # replies that the engine has not let go of
        self._metrics = Metrics(self._slots_now, lambda: self.requests, lambda: self.waiting)
        self._app = Guards(self._router(), settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def engine(self) -> Engine:
        """The engine, which may be closed for a while; what it knows of text and sizes is there all the same."""
        return self._engines.engine

    @property
    def sleeping(self) -> bool:
        """Whether the model is unloaded until somebody asks."""
        return self._engines.sleeping

    @property
    def requests(self) -> int:
        """How many requests run or wait."""
        return len(self._relays)

    @property
    def waiting(self) -> int:
        """How many requests the engine has not begun."""
        return sum(relay.prompt is None for relay in tuple(self._relays))

    def stop(self) -> None:
        """Ends every reply and lets no new one begin."""
        self.stopping = True
        for relay in tuple(self._relays):
            relay.cancel(STOPPING)

    def close(self) -> None:
        """Ends the engine, whichever it is now; nothing of it may be in use."""
        self._engines.close()

    def _router(self) -> Router:
        endpoints: dict[str, _Endpoint] = {
            "/health": _Endpoint(self, "GET", self._health),
            "/metrics": _Endpoint(self, "GET", self._metrics_text),
            "/props": _Endpoint(self, "GET", self._props),
            "/slots": _Endpoint(self, "GET", self._slots),
            "/v1/models": _Endpoint(self, "GET", self._models),
            "/v1/models/{name:path}": _Endpoint(self, "GET", self._one_model),
        }
        for path in FILES:
            endpoints[path] = _Endpoint(self, "GET", _page)
        for path, dialect in DIALECTS.items():
            endpoints[path] = _Endpoint(self, "POST", partial(self._generate, dialect), dialect.field)
        for path, answer in ANSWERS.items():
            endpoints[path] = _Endpoint(self, "POST", partial(self._answer, answer))
        routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
        return Router(routes, redirect_slashes=False, default=_Endpoint(self, None, _nothing_there))

    # ---- what needs no device
    async def _health(self, http: HttpRequest) -> ASGIApp:
        status = "closed" if self._engines.ended else "stopping" if self.stopping else "ok"
        body = {"status": status, "requests": self.requests}
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    async def _metrics_text(self, http: HttpRequest) -> ASGIApp:
        return Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _props(self, http: HttpRequest) -> ASGIApp:
        return JSONResponse(props(self.engine, self.settings, sleeping=self.sleeping))

    async def _slots(self, http: HttpRequest) -> ASGIApp:
        return JSONResponse(described_slots(self._slots_now(), self.engine.max_context))

    def _slots_now(self) -> list[Slot]:
        return [] if self.sleeping else self.engine.slots()

    async def _models(self, http: HttpRequest) -> ASGIApp:
        model = self._model_object()
        # Some clients look for the names in a list of their own.
        names = {"name": model["id"], "model": model["id"], "capabilities": ["completion", "tools"]}
        return JSONResponse({"object": "list", "data": [model], "models": [names]})

    async def _one_model(self, http: HttpRequest) -> ASGIApp:
        return JSONResponse(self._model_object())  # any name is accepted, as in requests

    def _model_object(self) -> dict[str, Any]:
        context = self.engine.max_context
        return {
            "id": self.settings.model, "object": "model", "created": self._created, "owned_by": "lily",
            "context_length": context, "max_model_len": context, "meta": {"n_ctx": context},
            "modalities": {"input": ["text"], "output": ["text"]},
        }  # fmt: skip

    async def _answer(self, answer: Answer, http: HttpRequest) -> ASGIApp:
        body = await self._body(http)
        return JSONResponse(await asyncio.to_thread(lambda: answer(self.engine, self._model, json_object(body))))

    async def _body(self, http: HttpRequest) -> bytes:
        self._check_running()
        return await read_body(http, self.settings.max_body, self.settings.request_timeout)

    def told(self, error: Exception, field: str) -> RequestError:
        """What the client is told. Where the fault is not its own the log says more, but nothing of the prompt."""
        failure = as_request_error(error, field, hidden=str(self.engine.model.path))
        if failure.code == "bug":
            frames = reversed(traceback.extract_tb(error.__traceback__))
            LOG.error("%s at %s", type(error).__name__, " < ".join(f"{f.filename}:{f.lineno}" for f in frames))
        elif failure.status == 500:
            LOG.error("%s", error)
        return failure

    def failed(self, path: str, failure: RequestError) -> None:
        """A request is answered with an error."""
        if path in DIALECTS:
            self._metrics.failed(path, str(failure.status))
        LOG.info("%s %d: %s", show(path), failure.status, failure.code or failure.param)

    def _check_running(self) -> None:
        if self.stopping or self._engines.ended:
            raise self._over()

    def _over(self) -> RequestError:
        """No request is answered any more."""
        why = STOPPING if self.stopping else "the engine has ended, and the server has to be started again"
        return RequestError(503, f"{why}; send the request again later", code="stopping")

    # ---- replies
    async def _generate(self, dialect: Dialect, http: HttpRequest) -> ASGIApp:
        body = await self._body(http)
        request = await asyncio.to_thread(lambda: dialect.read(json_object(body), self._model))
        head = Head.new(dialect.prefix, self.settings.model)
        return partial(self._respond, request, dialect.reply(head, request, self._token_bytes))

    def _token_bytes(self, id: int) -> bytes:
        return self.engine.tokenizer.token_bytes[id]

    async def _respond(self, request: Request, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        began, path = time.monotonic(), scope["path"]
        whole = not request.stream and not reply.ordered
        async with self._relay(request, receive, whole=whole) as relay:
            outgoing = Outgoing(relay, send, self.settings)
            try:
                done = await (outgoing.stream(reply) if request.stream else outgoing.whole(reply))
            except Exception as error:
                if relay.ended in (GONE, STALLED):
                    LOG.info("%s: %s", path, relay.ended)
                    self._metrics.failed(path, "gone" if relay.ended == GONE else "stalled")
                    return
                over = relay.ended == STOPPING or self._engines.ended
                failure = self._over() if over else self.told(error, request.prompt_field)
                self.failed(path, failure)
                await outgoing.fail(failure, reply if request.stream else None, scope, receive)
            else:
                for one in done:
                    self._metrics.done(path, one)
                LOG.info("%s 200: %s", path, _figures(done, time.monotonic() - began))

    @asynccontextmanager
    async def _relay(self, request: Request, receive: Receive, *, whole: bool) -> AsyncIterator[Relay]:
        """The way of a reply, which ends with this block at the latest. RequestError (503): too many wait.

        whole: of its chunks only the last one is wanted.
        """
        self._check_running()
        if self.requests >= self.settings.queue + self.engine.sequences:
            raise RequestError(
                503, f"{self.requests} requests run or wait; send this one later", code="queue_full",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )  # fmt: skip
        relay = Relay(self.settings.request_timeout)
        self._relays.add(relay)
        threading.Thread(target=self._work, args=(relay, request, whole), name="lily-reply", daemon=True).start()
        watcher = asyncio.create_task(_watch(receive, relay))
        try:
            yield relay
        finally:
            watcher.cancel()
            relay.cancel(GONE)

    def _work(self, relay: Relay, request: Request, whole: bool) -> None:
        """The thread of a reply."""
        try:
            with self._engines.lease() as engine:
                relay.run(*(partial(_open, engine, branch) for branch in branches(request)), whole=whole)
        finally:
            self._relays.discard(relay)


class _Endpoint:
    """One path: its method, and what makes the response. Whatever goes wrong before it begins is told the client."""

    def __init__(self, app: App, method: str | None, handler: Handler, field: str = "messages") -> None:
        self._told, self._failed = app.told, app.failed
        self._method, self._handler, self._field = method, handler, field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            method = scope["method"]
            if self._method and method != self._method and (method, self._method) != ("HEAD", "GET"):
                raise RequestError(405, f"{method} is not allowed here, only {self._method}",
                                   headers={"Allow": self._method})  # fmt: skip
            response = await self._handler(HttpRequest(scope, receive))
            await response(scope, receive, send)
        except Exception as error:
            failure = self._told(error, self._field)
            self._failed(scope["path"], failure)
            await refusal(failure, scope["path"])(scope, receive, send)


def _open(engine: Callable[[], Engine], request: Request, on_prompt: OnPrompt) -> Stream:
    return open_stream(engine(), request, on_prompt)


async def _page(http: HttpRequest) -> ASGIApp:
    return page_file(http.url.path)


async def _nothing_there(http: HttpRequest) -> ASGIApp:
    paths = ", ".join((*DIALECTS, "/v1/models", "/health", "/metrics", "/props", "/slots", *ANSWERS))
    raise RequestError(404, f"there is nothing at this path; there are {paths}", code="not_found")


async def _watch(receive: Receive, relay: Relay) -> None:
    """Waits until the client goes, and ends its reply."""
    while (await receive())["type"] != "http.disconnect":
        pass
    relay.cancel(GONE)


def _figures(replies: list[Completion], seconds: float) -> str:
    first, last = replies[0], replies[-1]
    return (
        f"{first.prompt_tokens} tokens of prompt ({first.cached_tokens} cached: {first.reuse}), "
        f"{sum(reply.completion_tokens for reply in replies)} of reply, {last.finish_reason}, {seconds:.2f} s"
    )
