# SPDX-License-Identifier: Apache-2.0
"""The fields of a request's JSON object: read by name and type, with an error that names the field.

A field that is null counts as one that is not there.  Not handled: values that the engine checks by itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from lily.errors import show
from lily.server.errors import RequestError, wrong

_NAMES = {bool: "true or false", str: "a string", dict: "an object", list: "a list"}


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. RequestError (400) for what is none."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # half a character, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 text (byte {error.start}); send JSON in UTF-8") from None
    except UnicodeEncodeError:
        raise RequestError(400, "the body has a string with half of a surrogate pair; send whole characters") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body is {_json_type(value)}; allowed: a JSON object")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _json_type(value: object) -> str:
    for kind, name in _NAMES.items():
        if isinstance(value, kind):
            return name
    return "null" if value is None else "a number"


class Fields:
    """A JSON object whose fields are taken by name; ``where`` is its own name within the request, if it has one."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values, self._prefix = values, f"{where}." if where else ""

    def name(self, field: str) -> str:
        """The full name of a field, for messages."""
        return self._prefix + field

    def given(self, field: str) -> Any:
        """The value as it is; None if there is none."""
        return self._values.get(field)

    def refuse(self, field: str, allowed: str) -> NoReturn:
        """RequestError (400): the value is not one of those allowed."""
        full = self.name(field)
        seen = "missing" if self.given(field) is None else show(self.given(field))
        raise wrong(full, f"{full} is {seen}; allowed: {allowed}")

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self._typed(field, bool)
        return default if value is None else bool(value)

    def text(self, field: str) -> str | None:
        """A string."""
        value: str | None = self._typed(field, str)
        return value

    def mapping(self, field: str) -> dict[str, Any] | None:
        """An object."""
        value: dict[str, Any] | None = self._typed(field, dict)
        return value

    def items(self, field: str) -> list[Any] | None:
        """A list."""
        value: list[Any] | None = self._typed(field, list)
        return value

    def whole(self, field: str, low: int, high: int | None = None) -> int | None:
        """A whole number in bounds."""
        value = self.given(field)
        if value is None:
            return None
        if type(value) is not int or value < low or (high is not None and value > high):
            self.refuse(field, f"a whole number from {low}" + ("" if high is None else f" to {high}"))
        return value

    def one_of(self, field: str, allowed: Collection[str]) -> str | None:
        """One of some strings."""
        value = self.given(field)
        if value is not None and (not isinstance(value, str) or value not in allowed):
            self.refuse(field, ", ".join(allowed))
        return value

    def choice(self, field: str, allowed: Collection[str]) -> str:
        """One of some strings, which must be there."""
        value = self.one_of(field, allowed)
        if value is None:
            self.refuse(field, ", ".join(allowed))
        return value

    def unavailable(self, field: str, what: str, instead: str) -> NoReturn:
        """RequestError (400): a field's value is legal, and Lily cannot do it yet."""
        full = self.name(field)
        raise wrong(full, f"{full}: {what} is not available yet; {instead}", code="not_available")

    def _typed(self, field: str, kind: type) -> Any:
        value = self.given(field)
        if value is not None and not isinstance(value, kind):
            self.refuse(field, _NAMES[kind])
        return value
