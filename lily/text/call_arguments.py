# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call as the text of a JSON object, from parameters whose values are plain text.

The tool's JSON schema says which values are strings and which are JSON.  A string goes out as it arrives; so does what
may be either, as soon as it can only be a string.

Not handled: whether the values obey the schema otherwise; schemas behind a ``$ref`` that leads out of the tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_ANY = frozenset({"string", "object", "array", "number", "boolean"})
"""What a parameter without a type may be: of a bare ``null`` nobody has said that it is not the word."""
_NAMES = _ANY | {"integer", "null"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_LITERALS = {"null": "null", "true": "boolean", "false": "boolean"}
_PYTHON = {"None": "null", "True": "true", "False": "false"}
_SPACE = " \t\r\n"
_NUMERIC = re.compile(r"[-+.0-9eE]*[ \t\r\n]*")
_MAX_DEPTH = 16  # of schemas inside schemas
_HEAD = 64  # characters by which it is decided whether a text may be JSON


def parameter_types(parameters: object) -> dict[str, frozenset[str]]:
    """JSON types of each property of a tool's ``parameters`` schema."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): _types(schema, parameters, _MAX_DEPTH) or _ANY for key, schema in properties.items()}


def _types(schema: object, root: object, depth: int) -> frozenset[str]:
    """The types that ``schema`` names; none if it does not say, or names one that JSON has not."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth - 1)
    found = _own_types(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        if not found and isinstance(schema.get(key), list):
            parts = [_types(part, root, depth - 1) for part in schema[key]]
            if all(parts) or key == "allOf":
                found = frozenset().union(*parts)
    return found | {"null"} if found and schema.get("nullable") is True else found


def _own_types(schema: Mapping[Any, Any]) -> frozenset[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if names:
        return frozenset(names) if all(isinstance(name, str) and name in _NAMES for name in names) else frozenset()
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    shapes = {"properties": "object", "additionalProperties": "object", "items": "array"}
    return frozenset(kind for key, kind in shapes.items() if key in schema)


def _referred(reference: str, root: object) -> object:
    place = root if reference.startswith("#") else None
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "null")


class Arguments:
    """The JSON text of one call's arguments: what the methods give, joined. Parameters come one after the other.

    A parameter that was given already is left out: what was written of the first is gone by then.
    """

    def __init__(self, types: Mapping[str, frozenset[str]]) -> None:
        """types: of the tool's parameters by name; one that it does not have may be of any."""
        self._types_of = types
        self._given: set[str] = set()
        self._types = _ANY
        self._waiting: list[str] | None = None  # of a value that may be JSON
        self._head = ""  # the beginning of it
        self._left_out = False

    def begin(self, key: str) -> str:
        """The next parameter."""
        self._left_out = key in self._given
        if self._left_out:
            return ""
        start = "{" if not self._given else ", "
        self._given.add(key)
        self._types = self._types_of.get(key, _ANY)
        self._head = ""
        strings_only = self._types == {"string"}
        self._waiting = None if strings_only else []
        return f"{start}{json.dumps(key, ensure_ascii=False)}: " + ('"' if strings_only else "")

    def push(self, text: str) -> str:
        """More of its value."""
        if self._left_out or not text:
            return ""
        if self._waiting is None:
            return _escaped(text)
        self._waiting.append(text)
        if len(self._head) < _HEAD:
            self._head = (self._head + text).lstrip(_SPACE)[:_HEAD]
        if "string" not in self._types or _may_be_json(self._head, self._types):
            return ""
        value, self._waiting = "".join(self._waiting), None
        return '"' + _escaped(value)

    def end(self) -> str:
        """The value is complete."""
        if self._left_out:
            return ""
        if self._waiting is None:
            return '"'
        return _as_json("".join(self._waiting), self._types)

    def close(self) -> str:
        """The call is complete."""
        return "}" if self._given else "{}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _may_be_json(head: str, types: Iterable[str]) -> bool:
    """Whether what begins with ``head`` may be JSON of one of the ``types`` other than a string."""
    if not head:
        return True
    if head[0] in "{[":
        return ("object" if head[0] == "{" else "array") in types
    if head[0] in "-0123456789":
        return ("number" in types or "integer" in types) and _NUMERIC.fullmatch(head) is not None
    bare = head.rstrip(_SPACE)
    return any(kind in types and literal.startswith(bare) for literal, kind in _LITERALS.items())


def _as_json(text: str, types: frozenset[str]) -> str:
    """A complete value: itself if it is JSON of one of ``types``, otherwise a JSON string."""
    bare = text.strip(_SPACE)
    if bare in _PYTHON and _LITERALS[_PYTHON[bare]] in types:
        bare = _PYTHON[bare]  # as models write that have read more Python than JSON
    kind = _json_kind(bare)
    fits = kind in types or (kind == "integer" and "number" in types)
    # Where no string is allowed, JSON of the wrong type is still nearer to what is meant.
    if fits or (kind is not None and "string" not in types):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _json_kind(text: str) -> str | None:
    """The type of a JSON text that is no string, None for all else: also for what could not be sent or read again."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair, written as an escape
    except (ValueError, RecursionError):
        return None
    kind = _kind(value)
    return None if kind == "string" else kind


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity, which JSON has not
