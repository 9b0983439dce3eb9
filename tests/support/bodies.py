# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests that a dialect has to refuse by name, or at least not to fail on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import InvalidRequestError
from lily.server.errors import RequestError

Read = Callable[[dict[str, Any]], object]


def check_refusal(read: Callable[[], object], at_fault: str) -> None:
    """``read`` refuses, and names the field."""
    with pytest.raises(RequestError) as error:
        read()
    assert (error.value.status, error.value.param) == (400, at_fault)
    assert at_fault in str(error.value)


def check_any_body(read: Read, fields: Sequence[str], keys: Sequence[str], words: Sequence[str]) -> None:
    """Values of every kind in ``fields``, made of objects with ``keys``, are read or refused; always the same ones."""
    scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(words)
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner),
        max_leaves=12,
    )

    @settings(max_examples=200, derandomize=True, deadline=None, database=None)
    @given(st.dictionaries(st.sampled_from(fields), values))
    def check(body: dict[str, Any]) -> None:
        with suppress(RequestError, InvalidRequestError):
            read(body)

    check()
