# SPDX-License-Identifier: Apache-2.0
"""What a chat's reply has to be, whatever the model would write by itself: calls, a format, the end of its reasoning.

Plain data, and how it is made of OpenAI's words.  Not handled: how a reply is held to it (guide.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily.errors import InvalidRequestError, show

Tools = Sequence[Mapping[str, Any]]

_CHOICES = "auto, none, required, or {'type': 'function', 'function': {'name': NAME}}"


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


def demands_of(
    tools: Tools | None = None, *, tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None, response_format: Mapping[str, Any] | None = None,
    reasoning_budget: int | None = None,
) -> Demands:  # fmt: skip
    """The demands of a request in OpenAI's words; of ``tools`` the names count. Raises InvalidRequestError."""
    if parallel_tool_calls not in (None, True, False):
        raise InvalidRequestError(f"parallel_tool_calls is {show(parallel_tool_calls)}; allowed: true or false")
    if reasoning_budget is not None and (type(reasoning_budget) is not int or reasoning_budget < 0):
        raise InvalidRequestError(f"reasoning_budget is {show(reasoning_budget)}; allowed: a whole number from 0")
    call, function = _choice(tool_choice, tools or ())
    offered = bool(tools) and tool_choice != "none"
    return Demands(
        call=call, function=function, parallel=not offered or parallel_tool_calls is not False,
        schema=_schema(response_format), reasoning_tokens=reasoning_budget,
    )  # fmt: skip


def offered_tools(tools: Tools | None, tool_choice: object) -> Tools | None:
    """The tools that the model gets to see."""
    return None if tool_choice == "none" else tools or None


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool, which some clients give by itself."""
    return tool["function"] if isinstance(tool.get("function"), Mapping) else tool


def _choice(given: object, tools: Tools) -> tuple[bool, str | None]:
    """Whether a call is demanded, and of which function."""
    if given in (None, "auto", "none"):
        return False, None
    if given == "required":
        if not tools:
            raise InvalidRequestError("tool_choice is required, but tools has no function; give at least one")
        return True, None
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tool_choice is {show(given)}; allowed: {_CHOICES}")
    name: str = function["name"]
    if not any(function_of(tool).get("name") == name for tool in tools):
        raise InvalidRequestError(f"tool_choice names {show(name)}; allowed: the name of one of the tools")
    return True, name


def _schema(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"response_format is {show(given)}; allowed: an object with a type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(f"response_format.type is {show(kind)}; allowed: text, json_object, json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("response_format.json_schema has no schema; allowed: an object with name and schema")
    return schema
