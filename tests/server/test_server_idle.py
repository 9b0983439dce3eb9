# SPDX-License-Identifier: Apache-2.0
"""A server to which nobody comes: nothing wakes its event loop.

Not handled: the engine's thread (test_scheduler.py).
"""

from __future__ import annotations

import asyncio
from unittest import mock

from server_harness import Running, serving
from waiting import PATIENCE

from lily.engine import Engine
from lily.server import serving as server_module


async def timers() -> int:
    """How many times the running event loop will wake by itself."""
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(not timer.cancelled() for timer in scheduled)


def test_an_idle_server_has_set_no_timer(engine: Engine) -> None:
    with serving(engine) as server:
        assert server.server._loop is not None
        assert asyncio.run_coroutine_threadsafe(timers(), server.server._loop).result(PATIENCE) == 0


def test_a_response_has_the_time_all_the_same(server: Running) -> None:
    date = "Tue, 01 Dec 2026 10:00:00 GMT"
    with mock.patch.object(server_module, "formatdate", lambda usegmt: date if usegmt else ""):
        assert server.get("/health").headers["date"] == date
