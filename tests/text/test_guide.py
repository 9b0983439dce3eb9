# SPDX-License-Identifier: Apache-2.0
"""What a guide allows next, and which demands are refused: with the embedded model's tokenizer, without a model.

Not handled: replies of an engine (test_engine_demands.py).
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lily.checkpoint.resolve import resolve_model
from lily.errors import InvalidRequestError
from lily.text.demands import NONE, Demands, demands_of
from lily.text.guide import CLOSING, FOREVER, Guide, Guides
from lily.text.reply_parts import ReplyForm
from lily.text.tokenizer import Tokenizer

OPEN, THINKING = ReplyForm(), ReplyForm(reasoning=True, fresh=True, opens=False)
WITH_TOOLS = ReplyForm(tools={})


def tool(parameters: Any = None, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def of(**properties: Any) -> dict[str, Any]:
    return tool({"type": "object", "properties": properties, "required": list(properties)})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = resolve_model(None).path
    return Tokenizer.from_dir(path, json.loads((path / "config.json").read_text())["text_config"]["vocab_size"])


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer)


@pytest.fixture
def stop(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_ids[0]


def allowed(guide: Guide, tokenizer: Tokenizer) -> list[int]:
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32)
    guide.write(mask)
    return [int(id) for id in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def accepts(guide: Guide, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text may be written from here on; writes it."""
    for id in tokenizer.encode(text):
        if not guide.free and id not in allowed(guide, tokenizer):
            return False
        guide.take(id)
    return True


def calling(guides: Guides, tools: list[dict[str, Any]], stop: int, **demands: Any) -> Guide:
    guide = guides.guide(Demands(call=True, **demands), WITH_TOOLS, tools, [stop])
    assert guide is not None
    return guide


# ---- courses
def test_without_demands_there_is_no_guide(guides: Guides, stop: int) -> None:
    for form in (OPEN, THINKING, WITH_TOOLS):
        assert guides.guide(NONE, form, None, [stop]) is None
    assert guides.guide(Demands(parallel=False), OPEN, None, [stop]) is None
    assert guides.guide(Demands(reasoning_tokens=3), OPEN, None, [stop]) is None


def test_a_budget_forces_the_closing_sentence_and_leaves_the_rest_free(
    guides: Guides, tokenizer: Tokenizer, stop: int
) -> None:
    guide = guides.guide(Demands(reasoning_tokens=3), THINKING, None, [stop])
    assert guide is not None
    for left in (3, 2, 1):
        assert guide.free == left
        guide.take(5)
    for id in tokenizer.encode(CLOSING + "</think>\n\n"):
        assert (guide.free, allowed(guide, tokenizer)) == (0, [id])
        guide.take(id)
    assert guide.free == FOREVER


def test_reasoning_before_a_document_cannot_end_the_reply(guides: Guides, tokenizer: Tokenizer, stop: int) -> None:
    guide = guides.guide(Demands(schema={}), THINKING, None, [stop])
    assert guide is not None
    others = allowed(guide, tokenizer)
    assert stop not in others
    assert len(others) >= tokenizer.num_tokens - 1
    assert accepts(guide, tokenizer, 'Hm </think>\n\n{"a": [1, null]}')
    assert allowed(guide, tokenizer) == [stop]


@pytest.mark.parametrize("text", ["[", "text", "<tool_call>", '{"a": 1}}', '{"a": 01}', '{"a"}', "{'a': 1}"])
def test_what_is_no_object_cannot_be_written(guides: Guides, tokenizer: Tokenizer, stop: int, text: str) -> None:
    guide = guides.guide(Demands(schema={}), OPEN, None, [stop])
    assert guide is not None
    assert not accepts(guide, tokenizer, text)


KEYWORDS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, "12", "13"),
    ({"type": "number", "multipleOf": 0.5}, "1.5", "1.2"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"abcd"'),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    ({"type": "string", "format": "date"}, '"2024-02-03"', '"2024-2-3"'),
    ({"enum": ["x", 1]}, "1", "2"),
    ({"const": [1]}, "[1]", "[2]"),
    ({"type": ["boolean", "null"]}, "null", "0"),
    ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "true", '"t"'),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "5", "4"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, "[1, 2]", "[1, 2, 3]"),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, "[null]", "[null, null]"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, '{"a": null}', "{}"),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, '{"a": 1}', '{"b": 1}'),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, '{"ab": null}', '{"ab": 1}'),
    ({"type": "object", "additionalProperties": {"type": "null"}}, '{"z": null}', '{"z": 1}'),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, "null", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "legal", "illegal"), KEYWORDS, ids=lambda value: str(value)[:40])
def test_every_keyword_that_is_claimed_is_kept(
    guides: Guides, tokenizer: Tokenizer, stop: int, schema: dict[str, Any], legal: str, illegal: str
) -> None:
    for text, expected in ((legal, True), (illegal, False)):
        guide = guides.guide(Demands(schema=schema), OPEN, None, [stop])
        assert guide is not None
        whole = accepts(guide, tokenizer, text) and stop in allowed(guide, tokenizer)
        assert whole == expected, text


def test_a_value_of_text_ends_with_its_tag_and_may_hold_others(guides: Guides, tokenizer: Tokenizer, stop: int) -> None:
    call = (
        "<tool_call>\n<function=f>\n<parameter=t>\nOne </parameter> \n</function>\n\n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    tools = [of(t={"type": "string"}, n={"type": "integer"})]
    guide = calling(guides, tools, stop)
    assert accepts(guide, tokenizer, call)
    assert sorted(allowed(guide, tokenizer)) == sorted([stop, *tokenizer.encode("\n")])
    assert not accepts(calling(guides, tools, stop), tokenizer, call.replace("7", '"7"'))
    assert not accepts(calling(guides, tools, stop), tokenizer, call.replace("=f>", "=g>"))
    assert not accepts(calling(guides, tools, stop), tokenizer, call.replace("<parameter=n>\n7\n</parameter>\n", ""))
    once = calling(guides, tools, stop, parallel=False)
    assert accepts(once, tokenizer, call)
    assert allowed(once, tokenizer) == [stop]


def test_without_parallel_calls_a_free_reply_ends_after_its_first(
    guides: Guides, tokenizer: Tokenizer, stop: int
) -> None:
    guide = guides.guide(Demands(parallel=False), WITH_TOOLS, [tool()], [stop])
    assert guide is not None
    assert accepts(guide, tokenizer, "Text. <tool_call> anything </tool_call>")
    assert allowed(guide, tokenizer) == [stop]


def test_with_tools_a_document_may_be_a_call_instead(guides: Guides, tokenizer: Tokenizer, stop: int) -> None:
    for text in ("<tool_call> anything", '{"a": 1}'):
        guide = guides.guide(Demands(schema={}), WITH_TOOLS, [tool()], [stop])
        assert guide is not None
        assert accepts(guide, tokenizer, text)


# ---- refusals
def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"$ref": "http://example.com/schema"}, "nothing is fetched"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "nothing is fetched"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "thing"}, "thing"),
        ({"type": "string", "pattern": "(?=a)"}, "look"),
        ({"description": "x" * 70_000}, "65,536"),
        (deep(70), "64 levels"),
        ({"const": float("nan")}, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused(guides: Guides, stop: int, schema: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"(?s)^response_format: .*{word}"):
        guides.guide(Demands(schema=schema), OPEN, None, [stop])


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        ([of(a={"type": "string", "pattern": "^a$"})], "pattern of the text 'a'"),
        ([of(a={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]})], "format of the text"),
        ([of(a={"type": ["string", "null"], "maxLength": 3})], "maxLength"),
        ([of(**{"a>b": {}})], "cannot be written in a call"),
        ([tool(None, "a\nb")], "cannot be written in a call"),
        ([tool({"required": ["z"]})], "requires 'z'"),
        ([of(a={"$ref": "http://x"})], "nothing is fetched"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_tool_whose_call_cannot_be_forced_is_refused(guides: Guides, stop: int, tools: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^tools: .*{word}"):
        guides.guide(Demands(call=True), WITH_TOOLS, tools, [stop])


def test_a_reply_that_never_ends_or_has_begun_is_held_to_nothing(guides: Guides, stop: int) -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        guides.guide(Demands(schema={}), OPEN, None, [])
    with pytest.raises(InvalidRequestError, match="begun already"):
        guides.guide(Demands(schema={}), ReplyForm(opens=False), None, [stop])


def test_without_the_library_the_extra_is_named(tokenizer: Tokenizer, stop: int) -> None:
    with mock.patch.dict(sys.modules, {"llguidance": None}):
        with pytest.raises(InvalidRequestError, match=r"llguidance; install it with: pip install '\.\[json\]'"):
            Guides(tokenizer).guide(Demands(schema={}), OPEN, None, [stop])
        assert Guides(tokenizer).guide(Demands(reasoning_tokens=1), THINKING, None, [stop]) is not None


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"reasoning_budget": True}, "reasoning_budget"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    ids=str,
)  # fmt: skip
def test_words_that_demand_nothing_known_are_refused_by_name(words: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}.* allowed: |^{field} is required"):
        demands_of(**{"tools": [tool()], **words})


def test_openai_s_words_become_demands() -> None:
    tools = [tool(), tool(name="g")]
    named = {"type": "function", "function": {"name": "g"}}
    assert demands_of(tools, tool_choice="auto", response_format={"type": "text"}) == NONE
    assert demands_of(tools, tool_choice="none", parallel_tool_calls=False) == NONE
    assert demands_of(tools, tool_choice="required") == Demands(call=True)
    assert demands_of(tools, tool_choice=named) == Demands(call=True, function="g")
    assert demands_of(tools, parallel_tool_calls=False) == Demands(parallel=False)
    assert demands_of(response_format={"type": "json_object"}, reasoning_budget=0) == Demands(
        schema={}, reasoning_tokens=0
    )
