# SPDX-License-Identifier: Apache-2.0
"""What every response has: who it is of, how many tokens it took, and how long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from lily._version import __version__
from lily.streaming import Completion


@dataclass(frozen=True)
class Head:
    """The identity of a response."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """One that no other response has."""
        return cls(prefix + os.urandom(12).hex(), int(time.time()), model)

    def of(self, kind: str) -> dict[str, Any]:
        """The fields with which an object of this response begins."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": f"lily-{__version__}",
        }  # fmt: skip


def usage(reply: Completion, *others: Completion) -> dict[str, Any]:
    """Tokens of the prompt, once, and of all replies to it; those that were not read again among the first."""
    replied = sum(one.completion_tokens for one in (reply, *others))
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": replied,
        "total_tokens": reply.prompt_tokens + replied,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def timings(reply: Completion) -> dict[str, Any]:
    """Times under the names that llama-server has for them."""
    times = reply.timings
    return {
        "cache_n": reply.cached_tokens,
        "cache_reason": reply.reuse,
        "prompt_n": reply.prompt_tokens - reply.cached_tokens,
        "prompt_ms": times.prompt_seconds * 1e3,
        "prompt_per_second": times.prompt_tokens_per_second,
        "predicted_n": reply.completion_tokens,
        "predicted_ms": times.generation_seconds * 1e3,
        "predicted_per_second": times.generation_tokens_per_second,
    }
