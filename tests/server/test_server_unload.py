# SPDX-License-Identifier: Apache-2.0
"""A model that is unloaded while nobody asks: the next request loads it again, and several share one load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_harness import HI, Running, open_tiny, serving
from waiting import PATIENCE, until

from lily.engine import Engine
from lily.errors import DeviceError
from lily.server.on_demand import OnDemand

SHORT = {"max_tokens": 4, "temperature": 0}
LONG_TEXT = [{"role": "user", "content": "Once upon a time there was a little girl. " * 60}]


class Loads:
    """Opens engines, and counts them; the next one fails, or waits, if that is asked for."""

    def __init__(self, **options: Any) -> None:
        self.options, self.opened = options, 0
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> Engine:
        self.opened += 1
        assert self.gate.wait(PATIENCE)
        if self.failing:
            raise DeviceError("there is no memory for it now")
        return open_tiny(**self.options)


@contextmanager
def unloading(loads: Loads, seconds: float = 0.05) -> Iterator[Running]:
    """A server whose model is unloaded almost at once."""
    with serving(open_tiny(**loads.options), reopen=loads, idle_unload=seconds) as server:
        try:
            yield server
        finally:
            server.stop()
            server.app.close()


def asleep(server: Running) -> None:
    until(lambda: server.app.sleeping and server.app.engine.closed, "the model is unloaded")


def test_the_next_request_loads_the_model_again() -> None:
    loads = Loads()
    with unloading(loads) as server:
        first = server.chat(**SHORT)
        asleep(server)
        before = loads.opened
        again = server.chat(**SHORT)
        assert loads.opened == before + 1
        assert again.json()["choices"] == first.json()["choices"]
        asleep(server)


def test_what_needs_no_model_does_not_load_it() -> None:
    loads = Loads()
    with unloading(loads) as server:
        asleep(server)
        assert server.get("/health").json() == {"status": "ok", "requests": 0}
        assert server.get("/props").json()["is_sleeping"] is True
        assert server.get("/slots").json() == []
        assert b"lily_conversations_bytes 0" in server.get("/metrics").content
        assert server.get("/v1/models").status_code == 200
        assert server.post("/tokenize", {"content": "a b"}).json()["count"] == 2
        assert server.post("/v1/messages/count_tokens", {"messages": HI}).status_code == 200
        assert server.chat(messages="Hi").status_code == 400
        assert loads.opened == 0
        server.chat(**SHORT)
        assert loads.opened == 1


def test_requests_that_come_together_share_one_load() -> None:
    loads = Loads()
    with unloading(loads) as server, ThreadPoolExecutor(4) as pool:
        asleep(server)
        loads.gate.clear()
        replies = [pool.submit(server.chat, **SHORT) for _ in range(4)]
        until(lambda: loads.opened == 1 and server.app.requests == 4, "all of them wait")
        assert server.get("/health").json() == {"status": "ok", "requests": 4}
        loads.gate.set()
        assert {reply.result().status_code for reply in replies} == {200}
        assert loads.opened == 1


def test_a_load_that_fails_is_told_and_tried_again() -> None:
    loads = Loads()
    with unloading(loads) as server:
        asleep(server)
        loads.failing = True
        response = server.chat(**SHORT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "device_error")
        assert server.get("/health").json()["status"] == "ok"
        loads.failing = False
        assert server.chat(**SHORT).status_code == 200


def test_conversations_are_on_disk_meanwhile(tmp_path: Path) -> None:
    loads = Loads(cache_dir=tmp_path)
    with unloading(loads) as server:
        first = server.chat({"messages": LONG_TEXT}, **SHORT).json()["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        asleep(server)
        again = server.chat({"messages": LONG_TEXT}, **SHORT).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 512


def test_a_model_that_is_in_use_stays() -> None:
    loads = Loads()
    with open_tiny() as engine:
        there = OnDemand(engine, loads, 1000)
        assert there._timer is not None
        with there.lease() as one:
            assert there._timer is None
            with there.lease():
                pass
            assert there._timer is None, "one is left"
            there._sleep()  # the timer had just run out
            assert one() is engine
            assert not engine.closed
        assert there._timer is not None
        there._sleep()
        assert (engine.closed, there.sleeping, there.ended) == (True, True, False)
        assert there._timer is not None
        there.close()
        assert there.ended
        there._sleep()
        assert loads.opened == 0


def test_an_engine_that_has_failed_is_not_unloaded() -> None:
    """Its failure is to be seen."""
    with open_tiny() as engine:
        there = OnDemand(engine, Loads(), 1000)
        engine.close()
        there._sleep()
        assert (there.sleeping, there.ended) == (False, True)
        there.close()


@pytest.mark.parametrize("seconds", [None, 0])
def test_without_a_time_it_stays(engine: Engine, seconds: float | None) -> None:
    there = OnDemand(engine, Loads(), seconds)
    with there.lease() as opened:
        assert opened() is engine
    assert there._timer is None
