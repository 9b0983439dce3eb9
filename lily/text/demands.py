# SPDX-License-Identifier: Apache-2.0
"""What a chat's reply has to be, whatever the model would write by itself: calls, a format, the end of its reasoning.

Plain data, checked when it is made.  Not handled: how a reply is held to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Demands:
    """Demands on one reply; without arguments there are none.

    call: whether it must call a tool. function: the tool that it must call, the only one then. parallel: whether it may
    call more than once. schema: the JSON schema of the content; ``{}`` is any JSON object. reasoning_tokens: how long
    the reasoning may be before it is closed.
    """

    call: bool = False
    function: str | None = None
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    reasoning_tokens: int | None = None

    @property
    def any(self) -> bool:
        """Whether the model's own choice is not enough."""
        return self != NONE


NONE = Demands()
