# SPDX-License-Identifier: Apache-2.0
"""What a server has done, as Prometheus reads it, and what it holds, as llama-server tells it.

Nothing of a prompt and no path is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from lily._version import __version__
from lily.engine import Engine
from lily.run.residents import Slot
from lily.server.settings import Settings
from lily.streaming import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1)


class Metrics:
    """Counts of one server.

    ``slots``: the conversations that are there. ``requests``: how many run or wait. ``waiting``: how many of them wait.
    """

    def __init__(
        self, slots: Callable[[], list[Slot]], requests: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=True)

        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"lily_{name}", what, labels, registry=registry)

        self._requests = count(
            "requests", "Replies, and requests without one, by path and by how they ended.", "path", "outcome"
        )
        self._prompt = count("prompt_tokens", "Tokens of prompts, those included that were there already.")
        self._cached = count("cached_tokens", "Tokens of prompts that were there already.")
        self._generated = count("generated_tokens", "Tokens of replies.")
        self._prompt_seconds = count("prompt_seconds", "Seconds until first tokens, without the wait for a turn.")
        self._generation_seconds = count("generation_seconds", "Seconds from first tokens to last ones.")
        self._first = Histogram(
            "lily_first_token_seconds", "From the beginning of a request's work to its first token.", buckets=_FIRST,
            registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "lily_between_tokens_seconds", "From one token to the next, the mean of each reply.", buckets=_BETWEEN,
            registry=registry,
        )  # fmt: skip
        running = Gauge("lily_requests_in_progress", "Requests that run or wait.", registry=registry)
        running.set_function(requests)
        wait = Gauge("lily_requests_waiting", "Those of them that the engine has not begun.", registry=registry)
        wait.set_function(waiting)
        held = Gauge("lily_conversations_bytes", "Memory of the conversations that are there.", registry=registry)
        held.set_function(lambda: sum(slot.nbytes for slot in slots()))

    def done(self, path: str, reply: Completion) -> None:
        """A reply has come to its end."""
        self._requests.labels(path, reply.finish_reason).inc()
        times = reply.timings
        self._prompt.inc(reply.prompt_tokens)
        self._cached.inc(reply.cached_tokens)
        self._generated.inc(reply.completion_tokens)
        self._prompt_seconds.inc(times.prompt_seconds)
        self._generation_seconds.inc(times.generation_seconds)
        self._first.observe(times.prompt_seconds)
        if reply.completion_tokens > 1:
            self._between.observe(times.generation_seconds / (reply.completion_tokens - 1))

    def failed(self, path: str, outcome: str) -> None:
        """A request has ended without a reply; outcome: a status of HTTP, or that the client has gone."""
        self._requests.labels(path, outcome).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self._registry)


def props(engine: Engine, settings: Settings, *, sleeping: bool) -> dict[str, Any]:
    """What llama-server tells of itself at ``/props``, in its names."""
    return {
        "default_generation_settings": {"n_ctx": engine.max_context, "params": dict(engine.info["sampling_defaults"])},
        "total_slots": engine.sequences,
        "model_alias": settings.model,
        "chat_template": engine.chat_template.source or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"lily-{__version__}",
        "is_sleeping": sleeping,
    }


def described_slots(slots: list[Slot], context: int) -> list[dict[str, Any]]:
    """The conversations that are there, as llama-server has them."""
    return [
        {
            "id": number, "n_ctx": context, "is_processing": slot.in_use, "n_tokens": slot.tokens,
            "kept_states": slot.states, "bytes": slot.nbytes,
        }
        for number, slot in enumerate(slots)
    ]  # fmt: skip
