# SPDX-License-Identifier: Apache-2.0
"""Lily: local inference for Qwen3.6-35B-A3B and its family.

>>> import lily
>>> with lily.Engine() as engine:
...     print(engine.generate("Once upon a time", max_tokens=40, seed=1).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lily._version import __version__

if TYPE_CHECKING:
    from lily.engine import Engine, Score
    from lily.errors import (
        CacheError,
        CheckpointError,
        ContextLengthError,
        DeviceError,
        InvalidRequestError,
        LilyError,
        LilyWarning,
        TimeLimitError,
    )
    from lily.run.requests import Scheduling
    from lily.sampling import SamplingParams
    from lily.session import Session
    from lily.streaming import Completion, Stream, StreamChunk, Timings, TokenLogprob, ToolCall, ToolCallDelta

__all__ = [
    "CacheError",
    "CheckpointError",
    "Completion",
    "ContextLengthError",
    "DeviceError",
    "Engine",
    "InvalidRequestError",
    "LilyError",
    "LilyWarning",
    "SamplingParams",
    "Scheduling",
    "Score",
    "Session",
    "Stream",
    "StreamChunk",
    "TimeLimitError",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
]

# Loaded on first use: the command line answers --help and --version, and plans, without numpy, tokenizer and device.
_HOMES = {
    "lily.engine": ("Engine", "Score"),
    "lily.errors": (
        "CacheError",
        "CheckpointError",
        "ContextLengthError",
        "DeviceError",
        "InvalidRequestError",
        "LilyError",
        "LilyWarning",
        "TimeLimitError",
    ),
    "lily.run.requests": ("Scheduling",),
    "lily.sampling": ("SamplingParams",),
    "lily.session": ("Session",),
    "lily.streaming": (
        "Completion",
        "Stream",
        "StreamChunk",
        "Timings",
        "TokenLogprob",
        "ToolCall",
        "ToolCallDelta",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
