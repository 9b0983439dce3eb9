# SPDX-License-Identifier: Apache-2.0
"""Values of a call's parameters, plain text, as JSON: by the tool's schema, and the same in every chopping."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.text.call_arguments import Arguments, parameter_types

S, I, N, B, O, A, Z = ({"type": kind} for kind in ("string", "integer", "number", "boolean", "object", "array", "null"))  # noqa: E741


def written(schema: object, pieces: list[str], **more: Any) -> tuple[Any, list[str]]:
    """The value that comes out for a parameter with ``schema``, and the fragments of its JSON."""
    properties = {"x": schema} if schema is not None else {}
    arguments = Arguments(parameter_types({"type": "object", "properties": properties, **more}))
    fragments = [arguments.begin("x"), *map(arguments.push, pieces), arguments.end(), arguments.close()]
    return json.loads("".join(fragments))["x"], fragments


def value(schema: object, text: str, **more: Any) -> Any:
    whole = written(schema, [text], **more)[0]
    assert written(schema, list(text), **more)[0] == whole
    return whole


# Schemas, and what texts become.
TABLE: list[tuple[list[Any], list[tuple[str, Any]]]] = [
    (
        [S, {"enum": ["a", "b"]}, {"const": "3"}, {"$ref": "#/$defs/a~1b"}],
        [(text, text) for text in ("", "a", " a\n", "3", "null", "true", '{"a": 1}', '"a"', "\\n", "\x00\u2028é")],
    ),
    (
        [
            I, {"allOf": [I]}, {"anyOf": [I, Z]}, {"anyOf": [{"anyOf": [I]}, Z]}, {"$ref": "#/$defs/n"},
            {"enum": [1, None]},
        ],
        [
            ("3", 3), (" -3\n", -3), ("3.5", 3.5), ("three", "three"), ("", ""), ("3 4", "3 4"), ("03", "03"),
            ("123456789012345678901234567890", 123456789012345678901234567890), ("1" * 5000, "1" * 5000),
        ],
    ),
    ([{"anyOf": [I, Z]}, Z, {"enum": [1, None]}], [("null", None), ("None", None), ("nil", "nil")]),
    (
        [N],
        [
            ("0.5", 0.5), ("1e3", 1000.0), ("7", 7), ("NaN", "NaN"), ("-Infinity", "-Infinity"), (".5", ".5"),
            ("None", "None"), ("True", "True"),
        ],
    ),
    ([B], [("true", True), ("false", False), ("True", True), ("False", False), ("yes", "yes"), ("1", 1)]),
    (
        [O, {"properties": {}}, {"additionalProperties": S}],
        [
            ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}), ("{'a': 1}", "{'a': 1}"), ("{", "{"), ("[1]", [1]),
            ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),  # half a character, which could not be sent on
            ('{"a": "\\ud83d\\ude80"}', {"a": "\U0001f680"}),
        ],
    ),
    (
        [A, {"items": S}],
        [
            ("[]", []), ('[\n  "a",\n  "b"\n]', ["a", "b"]), ('"a"', '"a"'), ("a, b", "a, b"),
            ("[" * 100_000, "[" * 100_000),
        ],
    ),
    (
        [{"type": ["string", "null"]}, {"anyOf": [S, Z]}, {"oneOf": [Z, S]}, {**S, "nullable": True}],
        [
            ("null", None), (" null\n", None),
            *((text, text) for text in ("", "n", "nul", "nulls", "null and void", "None", "3", "true", "{}")),
        ],
    ),
    ([{"type": ["string", "integer"]}], [("3", 3), ("3.5", "3.5"), ("3rd", "3rd"), ("-", "-"), ("007", "007")]),
    ([{"type": ["string", "number"]}], [("3", 3), ("3.5", 3.5), ("1.2.3", "1.2.3"), ("true", "true")]),
    ([{"type": ["boolean", "string"]}], [("true", True), ("True", "True"), ("truest", "truest"), ("f", "f")]),
    ([{"anyOf": [S, A]}], [('["a"]', ["a"]), ("[a]", "[a]"), ("a", "a"), ("{}", "{}"), ("  [1]", [1])]),
    (
        [  # of no type, or of one that JSON has not
            None, {}, True, {"description": "?"}, {"type": "any"}, {"type": []}, {"type": [3]}, {"type": {}},
            {"anyOf": [S, {}]}, {"anyOf": []}, {"$ref": "#/nowhere"}, {"$ref": "http://a/b"}, {"$ref": "#/$defs/loop"},
        ],
        [
            ("a", "a"), ("3", 3), ("3.5", 3.5), ("true", True), ("null", "null"), ("None", "None"), ("[1]", [1]),
            ('{"a": 1}', {"a": 1}), ('"a"', '"a"'), ("{a}", "{a}"), ("truth", "truth"), ("3 apples", "3 apples"),
            ("", ""),
        ],
    ),
]  # fmt: skip
CASES = [(schema, *pair) for schemas, pairs in TABLE for schema in schemas for pair in pairs]
DEFS = {"$defs": {"n": I, "a/b": S, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(("schema", "text", "want"), CASES, ids=range(len(CASES)))
def test_values_follow_the_schema(schema: Any, text: str, want: Any) -> None:
    got = value(schema, text, **DEFS)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize("parameters", [None, [], {}, {"properties": None}, {"properties": []}, "object"], ids=str)
def test_parameters_of_any_form_are_taken(parameters: Any) -> None:
    assert parameter_types(parameters) == {}


def test_parameters_keep_their_order_and_the_first_of_two_of_a_name() -> None:
    arguments = Arguments({})
    parts = []
    for key, text in (("b", "1"), ('a"\n', "x"), ("b", "2"), ("c", "[]")):
        parts += [arguments.begin(key), arguments.push(text), arguments.end()]
    assert "".join([*parts, arguments.close()]) == '{"b": 1, "a\\"\\n": "x", "c": []}'
    assert Arguments({}).close() == "{}"


@pytest.mark.parametrize(
    ("schema", "pieces", "first"),
    [
        (S, ["ab", "c"], 1),
        ({"anyOf": [S, Z]}, ["nul", "ls", "x"], 2),
        ({"anyOf": [S, Z]}, ["  ", "ab", "c"], 2),
        ({"type": ["string", "integer"]}, ["12", "a", "b"], 2),
        (None, ["tr", "ee", "s"], 2),
        (None, ["[a", "b", "c"], 4),  # may be a list until it is complete
        (I, ["a", "b", "c"], 4),
    ],
    ids=str,
)
def test_a_string_goes_out_as_soon_as_it_can_only_be_one(schema: Any, pieces: list[str], first: int) -> None:
    """first: the fragment in which its text begins, 0 being the key."""
    got, fragments = written(schema, pieces)
    assert got == "".join(pieces)
    assert next(i for i, fragment in enumerate(fragments[1:-1], 1) if fragment.strip('"')) == first


SCHEMAS = st.sampled_from([schemas[0] for schemas, _ in TABLE])
SNIPPETS = ["nu", "ll", "tr", "ue", "1", ".", "e5", "-", "{", "}", "[", "]", '"', "a", ":", ",", "NaN", "\\u", "d800"]
TEXTS = st.text() | st.lists(st.sampled_from([*SNIPPETS, " ", "\n"]), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, TEXTS, st.data())
def test_every_chopping_gives_the_same_valid_json(schema: Any, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, fragments = written(schema, [text])
    assert "".join(written(schema, pieces)[1]) == "".join(fragments)
    assert isinstance(whole, str) is False or whole == text
    json.dumps(whole, ensure_ascii=False).encode()
