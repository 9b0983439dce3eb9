# SPDX-License-Identifier: Apache-2.0
"""What a device says about itself: as data for programs, as rows with units for people.

Not handled: reasons for what was chosen (lily/doctor/paths.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lily.units import size

_LISTS = ("isas",)
_LEFT_OUT = ("name", "null")  # said elsewhere; a switch for tests
_BYTES = ("memory", "max_buffer", "allocated", "threadgroup_memory")
_SUFFIXES = {"_s": "s", "_ms": "ms"}
_LABELS = {"isa": "instruction set", "isas": "usable sets"}


def described(info: Mapping[str, str | int]) -> dict[str, Any]:
    """``Device.info`` with lists and numbers in place of their spelling."""
    return {key: _value(key, value) for key, value in info.items() if key not in _LEFT_OUT}


def rows(device: Mapping[str, Any]) -> list[str]:
    """A line for each thing that ``described`` holds; what the device left open has none."""
    shown = {_label(key): _words(key, value) for key, value in device.items() if key not in _LEFT_OUT}
    shown = {label: words for label, words in shown.items() if words}
    width = max(map(len, shown), default=0)
    return [f"{label:<{width}}  {words}" for label, words in shown.items()]


def _value(key: str, value: str | int) -> Any:
    if key in _LISTS:
        return str(value).split(",")
    if _unit(key) and isinstance(value, str):
        return float(value)
    return value


def _unit(key: str) -> str:
    return next((unit for suffix, unit in _SUFFIXES.items() if key.endswith(suffix)), "")


def _label(key: str) -> str:
    suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), "")
    return _LABELS.get(key) or key.removesuffix(suffix).replace("_", " ")


def _words(key: str, value: Any) -> str:
    if key in _BYTES:
        return size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g} {_unit(key)}" if _unit(key) else str(value)
