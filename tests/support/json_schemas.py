# SPDX-License-Identifier: Apache-2.0
"""Random JSON schemas from a seed, and whether a value obeys one: a small reading of the specification of its own.

Not handled: keywords that the generator does not make.
"""

from __future__ import annotations

import random
import re
from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_SIZES: dict[type, tuple[str, str]] = {
    str: ("minLength", "maxLength"),
    list: ("minItems", "maxItems"),
    dict: ("", ""),
}


def obeys(value: Any, schema: Any) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(obeys(value, one) for one in schema["anyOf"]):
        return False
    kind = schema.get("type")
    if kind in ("integer", "number"):
        number = isinstance(value, int) or (kind == "number" and isinstance(value, float))
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        return number and not isinstance(value, bool) and low <= value <= high
    if kind is not None and type(value) is not _TYPES[kind]:
        return False
    least, most = _SIZES.get(type(value), ("", ""))
    if least and not schema.get(least, 0) <= len(value) <= schema.get(most, len(value)):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return all(obeys(item, schema.get("items", {})) for item in value)
    return not isinstance(value, dict) or _object_obeys(value, schema)


def _object_obeys(value: dict[str, Any], schema: Any) -> bool:
    known = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    if schema.get("additionalProperties", True) is False and value.keys() - known.keys():
        return False
    return all(obeys(item, known.get(name, {})) for name, item in value.items())


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose documents are short; at its top an object."""
    names = rng.sample(["a", "name", "x y", "é", "count"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _random_value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "string", "maxLength": 5, "minLength": 1},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"type": "boolean"},
        {"enum": ["red", "green", 3, None]},
        {"const": {"k": [1]}},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    ]
    if depth and rng.random() < 0.4:
        return random_schema(rng, depth - 1)
    if depth and rng.random() < 0.3:
        return {"type": "array", "items": _random_value(rng, depth - 1), "minItems": 1, "maxItems": 3}
    return rng.choice(leaves)
