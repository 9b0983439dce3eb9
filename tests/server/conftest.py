# SPDX-License-Identifier: Apache-2.0
"""One small engine for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_harness import Running, open_tiny, serving

from lily.engine import Engine


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    """lily-tiny with a context of 1,024 tokens."""
    with open_tiny() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    """A server with the settings that users get."""
    with serving(engine) as running:
        yield running
