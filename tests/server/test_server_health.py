# SPDX-License-Identifier: Apache-2.0
"""``/health`` says whether requests can be answered, which is for the engine's thread to know.

Not handled: an engine that was closed, a server that stops (test_server_errors.py, test_server_streams.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from server_harness import open_tiny, serving
from waiting import until

from lily.errors import DeviceError
from lily.run.runner import Runner
from lily.run.scheduler import Scheduler


def test_a_request_that_fails_is_not_the_end_of_the_thread() -> None:
    with open_tiny(max_context=64) as engine, serving(engine) as server:
        want = server.chat(seed=1, max_tokens=4).json()["choices"]
        for failure in (ZeroDivisionError, MemoryError, DeviceError):
            with mock.patch.object(Runner, "start", side_effect=failure):
                assert server.chat(seed=1).status_code == 500
            server.is_free()
            assert server.get("/health").json() == {"status": "ok", "requests": 0}
            assert server.chat(seed=1, max_tokens=4).json()["choices"] == want


def test_a_thread_that_has_failed_is_told_by_health_and_to_everybody_who_waits() -> None:
    with open_tiny(max_context=64) as engine, serving(engine) as server, ThreadPoolExecutor(3) as pool:

        def fails(scheduler: Any) -> None:
            until(lambda: server.app.requests == 3, "all of them are there")
            raise ZeroDivisionError

        with mock.patch.object(Scheduler, "_admit", fails):
            responses = [pool.submit(server.chat, stream=stream) for stream in (False, True, False)]
            told = [response.result() for response in responses]
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "closed")
        late = server.chat()
        for response in (*told, late):
            assert response.status_code == 503
            assert "the engine has ended" in response.json()["error"]["message"]
