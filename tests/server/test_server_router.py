# SPDX-License-Identifier: Apache-2.0
"""Several servers behind a router that knows what each of them has read (docs/serving.md, "Several machines").

Each conversation returns to the server that holds it; one that dies takes nothing of the others with it.
Not handled: what the router itself does (it is not Lily's); servers that really are on several machines.
"""

from __future__ import annotations

import importlib.util
import itertools
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from answers import CHAT, COMPLETIONS, RESPONSES, Answer, received
from cli_harness import address_of, lily_process, python_process
from needs import ROUTER
from server_harness import HI, open_tiny
from waiting import PATIENCE, until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason=ROUTER),
]
_FLAGS = ["serve", "--device", "cpu", "-t", "1", "-c", "2048", "--port", "0", "--log-level", "error"]
_QUICKLY = ["--cb-failure-threshold", "2", "--worker-startup-check-interval", "1"]  # the servers' state is noticed
_HOW: dict[str, Any] = {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}}


@dataclass
class Routed:
    """Two servers, and the client of the router before them."""

    processes: list[subprocess.Popen[bytes]]
    urls: list[str]
    http: httpx.Client

    def ask(self, messages: list[Any], **how: Any) -> dict[str, Any]:
        response = self.http.post(CHAT, json={"messages": messages, "max_tokens": 16, **_HOW, **how})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def figure(self, name: str, server: int) -> float:
        """One of a server's own figures, all labels together."""
        text = httpx.get(f"{self.urls[server]}/metrics", trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readiness").status_code == 200 and http.get("/workers").json()["total"] == 2
    except httpx.TransportError:
        return False


@pytest.fixture
def routed() -> Iterator[Routed]:
    with ExitStack() as stack:
        processes = [lily_process(*_FLAGS, stderr=subprocess.DEVNULL) for _ in range(2)]
        urls = [stack.enter_context(address_of(process)) for process in processes]
        ports = [str(free_port()), str(free_port())]
        router = python_process(
            "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", ports[0],
            "--prometheus-port", ports[1], "--policy", "cache_aware", "--worker-urls", *urls, *_QUICKLY,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.enter_context(router)
        stack.callback(router.kill)
        http = httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=PATIENCE, trust_env=False)
        stack.enter_context(http)
        until(lambda: is_ready(http), "the router knows both servers")
        yield Routed(processes, urls, http)


def conversation(number: int) -> list[dict[str, str]]:
    """The beginning of one that shares nothing with another."""
    words = ("moon dog tree", "red blue sea", "bread salt cup", "north road hill")[number]
    return [
        {"role": "system", "content": f"{number} {words} " * 80}, {"role": "user", "content": f"Tell me of {words}."}
    ]  # fmt: skip


def streams(routed: Routed, stack: ExitStack, count: int, tokens: int) -> list[tuple[httpx.Response, Iterator[str]]]:
    """Replies that have begun, each sent while those before it go on, so that they are shared out."""
    begun = []
    for number in range(count):
        body = {
            "messages": conversation(number), "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **_HOW,
        }  # fmt: skip
        response = stack.enter_context(routed.http.stream("POST", CHAT, json=body))
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        begun.append((response, lines))
    return begun


def test_each_conversation_returns_to_the_server_that_holds_it(routed: Routed) -> None:
    chats, turns = [conversation(0), conversation(1)], 4
    with ExitStack() as stack:
        for _, lines in streams(routed, stack, 2, 900):
            for _ in lines:
                pass
    read = [[0], [0]]
    for _ in range(turns):
        for chat, tokens in zip(chats, read, strict=True):
            reply = routed.ask(chat)
            usage = reply["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * tokens[-1]
            tokens.append(usage["prompt_tokens"])
            chat += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    assert all(tokens == sorted(set(tokens)) for tokens in read)
    assert [routed.figure("lily_requests_total", server) for server in (0, 1)] == [1 + turns] * 2


def test_dialects_pass_through_it(routed: Routed) -> None:
    prompts = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}
    for path, stream in itertools.product(prompts, (False, True)):
        most = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = {**prompts[path], "model": "any", "temperature": 0, "stream": stream, most: 8}
        body |= {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
        through = routed.http.post(path, json=body)
        straight = httpx.post(routed.urls[0] + path, json=body, trust_env=False)
        assert (through.status_code, straight.status_code) == (200, 200), through.text
        got, want = (received(path, response.text, stream=stream) for response in (through, straight))
        assert (got, got.tokens) == (want, 8)


def test_one_that_dies_takes_nothing_of_the_other_with_it(routed: Routed) -> None:
    count, tokens = 4, 1000
    with open_tiny(max_context=2048) as engine:
        how: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "seed": 1}
        quiet = {"enable_thinking": False}
        wants = [Answer.of(engine.chat(conversation(n), template_kwargs=quiet, **how)) for n in range(count)]

    def rest(stream: tuple[httpx.Response, Iterator[str]]) -> Answer | None:
        """None: it has broken off."""
        lines = []
        try:
            lines = list(stream[1])
        except httpx.TransportError:
            return None
        return received(CHAT, "\n".join(lines), stream=True) if lines[-2:-1] == ["data: [DONE]"] else None

    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        begun = streams(routed, stack, count, tokens)
        routed.processes[0].kill()
        got = list(pool.map(rest, begun))
    ended = [want for answer, want in zip(got, wants, strict=True) if answer is not None]
    assert [answer for answer in got if answer is not None] == ended
    assert len(ended) >= count // 2
    for number in range(count):  # those of the dead one go on with the other one, which reads them anew
        assert routed.ask(conversation(number), max_tokens=4)["usage"]["completion_tokens"] == 4
