# SPDX-License-Identifier: Apache-2.0
"""An engine that is closed while nobody needs it, and opened again for the next request.

Not handled: conversations, which the engine keeps on disk if it was told where (run/shelf.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lily.engine import Engine

LOG = logging.getLogger("lily.server")


class OnDemand:
    """``engine`` is closed after ``seconds`` without a lease; ``reopen`` makes another one. None: it stays.

    For any thread. sleeping: it is closed, and will be opened when it is needed.
    """

    def __init__(self, engine: Engine, reopen: Callable[[], Engine] | None, seconds: float | None) -> None:
        self.engine = engine
        """The last one; what it knows of text and sizes is there while it sleeps, too."""
        self.sleeping = False
        self._reopen, self._seconds = reopen, seconds
        self._lock = threading.Lock()
        self._leases = 0
        self._over = False
        self._timer: threading.Timer | None = None
        self._wait()

    @property
    def ended(self) -> bool:
        """Whether no request can run any more."""
        return self.engine.closed and not self.sleeping

    @contextmanager
    def lease(self) -> Iterator[Callable[[], Engine]]:
        """The engine stays for the block. What it gives, when called, is the open engine, which may have to be loaded.

        Those that call it at the same time share one load. LilyError: it cannot be opened.
        """
        with self._lock:
            self._leases += 1
            self._stop_waiting()
        try:
            yield self._awake
        finally:
            with self._lock:
                self._leases -= 1
                self._wait()

    def close(self) -> None:
        """Ends it for good."""
        with self._lock:
            self._over = True
            self._stop_waiting()
            self.sleeping = False
            self.engine.close()

    def _awake(self) -> Engine:
        with self._lock:
            if self.sleeping and self._reopen is not None:
                began = time.monotonic()
                self.engine = self._reopen()
                self.sleeping = False
                LOG.info("the model was loaded again in %.1f s", time.monotonic() - began)
            return self.engine

    def _wait(self) -> None:
        if self._seconds and self._reopen and not (self._leases or self._over or self.sleeping):
            self._timer = threading.Timer(self._seconds, self._sleep)
            self._timer.daemon = True
            self._timer.start()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sleep(self) -> None:
        with self._lock:
            if self._leases or self._over or self.sleeping or self.engine.closed:
                return  # somebody came in the last moment, or the engine has failed, which is to be seen
            self.sleeping = True
            self.engine.close()
            LOG.info("the model was unloaded after %g s without a request", self._seconds)
