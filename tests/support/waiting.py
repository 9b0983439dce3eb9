# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests: for what happens, never for a time.

No test passes or fails by how long something took: machines differ, and a busy one stands still for seconds.
``PATIENCE`` only turns what would never end into a failure.  Not handled: times that the product measures itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300  # seconds


def until(reached: Callable[[], bool], what: str) -> None:
    """Waits until something is the case; AssertionError naming it if that does not come."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, f"it did not come to this: {what}"
        time.sleep(0.01)
