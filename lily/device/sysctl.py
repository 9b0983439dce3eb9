# SPDX-License-Identifier: Apache-2.0
"""Values of macOS's sysctl; None for a name that it does not have, and on other systems."""

from __future__ import annotations

import ctypes


def raw(name: str) -> bytes | None:
    """The bytes of the value."""
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    size = ctypes.c_size_t()
    if call is None or call(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    value = ctypes.create_string_buffer(size.value)
    if call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return value.raw[: size.value]


def text(name: str) -> str | None:
    """The value as text."""
    value = raw(name)
    return None if value is None else value.rstrip(b"\0").decode("utf-8", "replace")


def number(name: str) -> int | None:
    """The value as a whole number."""
    value = raw(name)
    return None if value is None else int.from_bytes(value, "little")
