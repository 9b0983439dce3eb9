# SPDX-License-Identifier: Apache-2.0
"""What a server was told when it was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_BODY = 32 << 20
"""Bytes of a request; a prompt that fills the context of 262,144 tokens has about 1 MB."""


@dataclass(frozen=True)
class Settings:
    """How a server answers. Times are seconds.

    model: the name under which the model is listed. hosts: names that the Host header may have beside those of this
    machine and the address that was connected to. origins: web pages that may use the server; ``*`` is all.
    key: what clients must show, if there is one. max_tokens: at most that many tokens of a reply, whatever is asked.
    queue: requests that may wait while one runs in each of the engine's sequences. request_timeout: how long a client
    may take to send a request, and may let a reply lie unread. keep_alive: between two signs of life while the prompt
    is read. template_args: options of the chat template where the request does not give them. max_body: bytes of a
    request. idle_unload: how long nobody asks before the model is unloaded.
    """

    model: str
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    key: str | None = None
    max_tokens: int | None = None
    queue: int = 64
    request_timeout: float = 300.0
    keep_alive: float = 5.0
    template_args: Mapping[str, Any] = field(default_factory=dict)
    max_body: int = MAX_BODY
    idle_unload: float | None = None
