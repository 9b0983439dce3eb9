# SPDX-License-Identifier: Apache-2.0
"""Hours of use in short: a server in a process of its own, asked rightly and wrongly by clients that come and go.

Right answers stay right, ``/health`` says how things stand, ``/metrics`` knows every request, memory does not grow, and
in the end nothing is left to do.
Not handled: what is refused how (test_server_errors.py, test_server_fuzz.py); time-outs (test_server_streams.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from answers import CHAT, Answer, check_refusal, received
from asks import Ask, answers_alone, ask
from cli_harness import address_of, python_process
from prometheus_client.parser import text_string_to_metric_families
from server_harness import HI, exchange, send
from waiting import PATIENCE, until

ROUND = 20  # requests at a time

# The command, with so little memory for what is under way to a client that one that does not read is noticed.
_COMMAND = """
import socket, sys
from lily.cli import main
from lily.server import serving
bind = serving.bind
def small(host, port):
    bound = bind(host, port)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return bound
serving.bind = small
sys.argv[0] = "lily"
main()
"""
_FLAGS = ["serve", "--device", "cpu", "-t", "1", "-c", "1024", "-n", "64", "--port", "0", "--log-level", "error"]


@contextmanager
def command() -> Iterator[tuple[int, int]]:
    """Process and port of a server."""
    process = python_process("-c", _COMMAND, *_FLAGS, stderr=subprocess.DEVNULL)
    with address_of(process) as address:
        yield process.pid, int(address.rpartition(":")[2])


class Soak:
    """Sends requests that its ``seed`` decides, and holds what comes to what should."""

    def __init__(self, port: int, right: list[tuple[Ask, Answer]], seed: int) -> None:
        self.port, self.right, self._seed = port, right, seed
        self.sent = Counter[str]()  # by path
        self.kinds = Counter[Any]()
        self.held: list[asyncio.StreamWriter] = []  # connections that nobody reads from
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False)

    def round(self, number: int) -> None:
        """Requests that run beside each other, and what must be true after them."""
        asyncio.run(self._round(number))
        until(lambda: self.counted() == self.sent, "each of them has ended and is counted")
        until(lambda: self.health() == {"status": "ok", "requests": 0}, "nothing is left to do")

    async def _round(self, number: int) -> None:
        draws = [random.Random(f"{self._seed}/{number}/{index}") for index in range(ROUND)]
        kinds = [draw.choices(list(_KINDS), weights=list(_KINDS.values()))[0] for draw in draws]
        tasks = [asyncio.create_task(kind(self, draw)) for kind, draw in zip(kinds, draws, strict=True)]
        self.kinds.update(kinds)
        while not all(task.done() for task in tasks):
            least = len(self.held)
            health = await asyncio.to_thread(self.health)
            assert health["status"] == "ok"
            assert least <= health["requests"] <= ROUND
            await asyncio.wait(tasks, timeout=0.02)
        await asyncio.gather(*tasks)
        for writer in self.held:
            writer.close()
        self.held = []

    def health(self) -> dict[str, Any]:
        return dict(self._http.get("/health").json())

    def counted(self) -> Counter[str]:
        """Requests by path, as the server has counted them."""
        found = Counter[str]()
        for family in text_string_to_metric_families(self._http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "lily_requests_total":
                    found[sample.labels["path"]] += int(sample.value)
        return found

    def close(self) -> None:
        self._http.close()

    # ---- what clients do
    def drawn(self, draw: random.Random) -> tuple[Ask, Answer]:
        """A request, which is counted as sent."""
        one, want = draw.choice(self.right)
        self.sent[one.path] += 1
        return one, want

    async def asks_rightly(self, draw: random.Random) -> None:
        one, want = self.drawn(draw)
        status, body = await exchange(self.port, one.path, one.body)
        assert status == 200, body
        assert received(one.path, body, stream=one.stream) == want

    async def breaks_off(self, draw: random.Random) -> None:
        """Goes after a drawn part of the response, which may be all or nothing of it."""
        one, _ = self.drawn(draw)
        reader, writer = await send(self.port, one.path, json.dumps(one.body).encode())
        await reader.read(draw.choice((1, 300, 3000, 100_000)))
        writer.close()

    async def goes_at_once(self, draw: random.Random) -> None:
        one, _ = self.drawn(draw)
        _, writer = await send(self.port, one.path, json.dumps(one.body).encode())
        writer.transport.abort()

    async def sends_a_half(self, draw: random.Random) -> None:
        one, _ = self.drawn(draw)
        data = json.dumps(one.body).encode()
        _, writer = await send(self.port, one.path, data[: draw.randrange(len(data))], length=len(data))
        writer.close()

    async def sends_no_json(self, draw: random.Random) -> None:
        one, _ = self.drawn(draw)
        data = bytearray(json.dumps(one.body).encode())
        data[draw.randrange(len(data) // 2) :] = draw.randbytes(draw.randrange(40))
        await self._is_refused(one.path, bytes(data), {400})

    async def sends_too_much(self, draw: random.Random) -> None:
        one, _ = self.drawn(draw)
        field = {"prompt": "a " * 1500} if "prompt" in one.body else {
            "input" if "input" in one.body else "messages": [{"role": "user", "content": "a " * 1500}]
        }  # fmt: skip
        await self._is_refused(one.path, json.dumps({**one.body, **field, "stream": False}).encode(), {400})

    async def sends_a_wrong_type(self, draw: random.Random) -> None:
        one, _ = self.drawn(draw)
        name = draw.choice(sorted(one.body))
        body = {**one.body, name: draw.choice([7.5, [[]], {"a": {}}, "\x00", -3])}
        await self._is_refused(one.path, json.dumps(body).encode(), {200, 400})  # some of them are right elsewhere

    async def reads_nothing(self, draw: random.Random) -> None:
        """Of replies that are much longer than what lies between server and client, until the round is over."""
        self.sent[CHAT] += 1
        body = {"messages": HI, "stream": True, "seed": 1, "n": 6, "ignore_eos": True, "logprobs": True}
        body["top_logprobs"] = 20
        reader, writer = await send(self.port, CHAT, json.dumps(body).encode(), receive_buffer=4096)
        await reader.readuntil(b"\r\n\r\n")
        self.held.append(writer)

    async def _is_refused(self, path: str, data: bytes, allowed: set[int]) -> None:
        status, body = await exchange(self.port, path, data)
        assert status in allowed, body
        if status != 200:
            check_refusal(path, body)


_KINDS: dict[Callable[[Soak, random.Random], Coroutine[Any, Any, None]], int] = {
    Soak.asks_rightly: 10, Soak.breaks_off: 4, Soak.goes_at_once: 1, Soak.sends_a_half: 1, Soak.sends_no_json: 1,
    Soak.sends_too_much: 1, Soak.sends_a_wrong_type: 2, Soak.reads_nothing: 1,
}  # fmt: skip


# ---- the process
def resident(pid: int) -> int:
    """Pages that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def files(pid: int) -> int:
    """Open files and connections."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def wake_ups(pid: int) -> int:
    """How many times a thread has gone to sleep or been put aside, those threads together that are there."""
    lines = [line for thread in threads(pid) for line in (thread / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def sleeps(pid: int) -> bool:
    """Whether no thread wakes for a second, which is what is to be seen and no time to wait for anything."""
    before = wake_ups(pid)
    time.sleep(1)
    return wake_ups(pid) == before


def check_nothing_is_left(pid: int, files_before: int, threads_before: int) -> None:
    """No connection, no thread but those of pools, and nothing to do for any of them."""
    until(lambda: files(pid) == files_before, "every connection is closed")
    pools = min(32, (os.cpu_count() or 1) + 4)
    assert len(threads(pid)) <= threads_before + pools
    until(lambda: sleeps(pid), "for a second nothing wakes")  # the last threads may still be on their way out


def check_flat(sizes: list[int]) -> None:
    """No larger in the last quarter of the rounds than in the second one, but for 2 %.

    Medians: what a round leaves in the areas of the C library's allocator is chance.
    """
    quarter = len(sizes) // 4
    assert median(sizes[-quarter:]) <= 1.02 * median(sizes[quarter : 2 * quarter])


@pytest.fixture(scope="module")
def right() -> list[tuple[Ask, Answer]]:
    """Requests, with what an engine answers that is asked nothing else."""
    asks = [ask(number) for number in range(100, 116)]
    return list(zip(asks, answers_alone(asks), strict=True))


@pytest.mark.parametrize("rounds", [10, pytest.param(110, marks=pytest.mark.full)])
def test_a_server_stays_as_it_is_whatever_it_is_asked(right: list[tuple[Ask, Answer]], rounds: int) -> None:
    linux, sizes = sys.platform.startswith("linux"), []
    with command() as (pid, port):
        before = (files(pid), len(threads(pid))) if linux else None
        with closing(Soak(port, right, seed=1)) as soak:
            for number in range(rounds):
                soak.round(number)
                sizes.append(resident(pid) if linux else 0)
            assert set(soak.kinds) == set(_KINDS)
        if before is not None:
            check_nothing_is_left(pid, *before)
    if rounds * ROUND > 2000:
        check_flat(sizes)
