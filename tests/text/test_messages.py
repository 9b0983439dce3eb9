# SPDX-License-Identifier: Apache-2.0
"""The table of message forms: what messages become before a template sees them, and which are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from chats import STRICT, A, S, T, U, call, embedded
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import InvalidRequestError
from lily.text.template import ChatTemplate, normalise_messages


def contents(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in normalise_messages(messages)]


# System and developer messages.


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([S, U], [("system", "S"), ("user", "U")]),
        ([S, {**S, "content": "S2"}, U], [("system", "S\n\nS2"), ("user", "U")]),
        ([{"role": "developer", "content": "D"}, U], [("system", "D"), ("user", "U")]),
        ([{"role": "developer", "content": "D"}, S, U], [("system", "D\n\nS"), ("user", "U")]),
        ([{**S, "content": " "}, S, U], [("system", "S"), ("user", "U")]),
        ([{**S, "content": ""}, U], [("system", ""), ("user", "U")]),
        ([S, U, A, S, U], [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "S"), ("user", "U")]),
        ([U, {"role": "developer", "content": "D"}], [("user", "U"), ("user", "D")]),
    ],
)
def test_leading_system_messages_merge_and_later_ones_stay_as_user_messages(
    messages: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    assert contents(*messages) == expected
    assert ChatTemplate(STRICT).render(messages) == "".join(f"[{role}:{content}]" for role, content in expected)


# Content.


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("text", "text"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a\n"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"text": "no type"}], "no type"),
        (({"type": "text", "text": "tuple", "cache_control": {"type": "ephemeral"}},), "tuple"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_content_becomes_a_string(role: str, content: object, text: str) -> None:
    assert contents(U, {"role": role, "content": content}) == [("user", "U"), (role, text)]


@pytest.mark.parametrize(
    "message", [call({}), {"role": "assistant"}, {"role": "tool", "content": None}, {"role": "tool"}]
)
def test_assistants_and_tools_may_say_nothing(message: dict[str, Any]) -> None:
    assert contents(U, message)[1] == (message["role"], "")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "system"}])
def test_others_must_say_something(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[1\] \({message['role']}\) has no content"):
        normalise_messages([U, message])


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "is image input; Lily reads text only"),
        ({"type": "image", "image": "x.png"}, "is image input"),
        ({"type": "input_image", "image_url": "x"}, "is image input"),
        ({"image_url": "x"}, "is image input"),
        ({"type": "text", "text": "hidden", "image": "x"}, "is image input"),
        ({"type": "input_audio", "input_audio": {}}, "is audio input"),
        ({"type": "video", "video": "x"}, "is video input"),
        ({"type": "file", "file": {}}, "is file input"),
        ({"type": "thinking", "text": "x"}, "unknown type 'thinking'; allowed: text"),
        ({}, "unknown type None"),
        ({"type": "text"}, "text must be a string, seen NoneType"),
        ({"type": "text", "text": 3}, "text must be a string, seen int"),
        ("bare", "must be an object, seen str"),
    ],
)
def test_blocks_that_are_not_text_are_named(block: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[1\]\.content\[1\].*{words}"):
        normalise_messages([U, {"role": "user", "content": [{"type": "text", "text": "look:"}, block]}])


@pytest.mark.parametrize("content", [3, {"type": "text", "text": "x"}, b"x", True])
def test_content_of_another_kind_is_named(content: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content must be a string or a list of text blocks"):
        normalise_messages([{"role": "user", "content": content}])


# Roles and shapes.


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (None, "messages must be a list of objects, seen NoneType"),
        ("hi", "messages must be a list of objects, seen str"),
        (U, "messages must be a list of objects, seen dict"),
        (["hi"], r"messages\[0\] must be an object, seen str"),
        ([{"content": "x"}], r"messages\[0\] has no role; allowed: system, developer, user, assistant, tool"),
        ([U, {"role": "bot", "content": "x"}], r"messages\[1\] has the unknown role 'bot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\] has the unknown role"),
        ([{**U, "tool_calls": [{}]}], r"messages\[0\] \(user\) has tool_calls"),
        ([U, {**A, "function_call": {"name": "f"}}], r"messages\[1\] has a function_call"),
        ([U, {**A, "reasoning_content": 3}], r"messages\[1\]\.reasoning_content must be a string"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        normalise_messages(messages)


def test_empty_optional_fields_count_as_missing() -> None:
    message = {**A, "tool_calls": None, "function_call": None, "reasoning_content": None, "reasoning": None}
    assert normalise_messages([U, message, {**U, "tool_calls": []}]) == [U, A, U]


def test_other_keys_are_kept() -> None:
    tool = {**T, "tool_call_id": "1", "name": "f"}
    assert normalise_messages([U, tool])[1] == tool


def test_reasoning_is_another_name_of_reasoning_content() -> None:
    assert normalise_messages([U, {**A, "reasoning": "R"}])[1] == {**A, "reasoning_content": "R"}
    both = {**A, "reasoning": "R", "reasoning_content": "first"}
    assert normalise_messages([U, both])[1] == {**A, "reasoning_content": "first"}


# Tool calls.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": {"b": [1, "č"]}}', {"a": {"b": [1, "č"]}}),
        (' {"a": 1}\n', {"a": 1}),
        ("", {}),
        ("  ", {}),
        ("{}", {}),
        ("null", {}),
        (None, {}),
        (..., {}),
    ],
)
def test_arguments_become_a_mapping(arguments: object, expected: dict[str, Any]) -> None:
    [made] = normalise_messages([U, call(arguments)])[1]["tool_calls"]
    assert made == {"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([1], "must be an object, seen list"),
        ("[1]", "must be an object, seen list"),
        ('"text"', "must be an object, seen str"),
        ("3", "must be an object, seen int"),
        (3, "must be an object, seen int"),
        ('{"a": 1', "is not valid JSON"),
        ("{'a': 1}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_arguments_that_are_no_object_are_named(arguments: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[2\]\.tool_calls\[0\]: arguments {words}"):
        normalise_messages([S, U, call(arguments)])


def test_a_call_without_its_wrapper_is_wrapped() -> None:
    bare = {**A, "tool_calls": [{"name": "f", "arguments": "{}"}]}
    assert normalise_messages([U, bare])[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"name": "f"}, r"tool_calls must be a list of objects, seen dict"),
        (["f"], r"tool_calls\[0\] must be an object, seen str"),
        ([{"type": "function", "function": "f"}], r"tool_calls\[0\] is not a function call"),
        ([{"type": "custom", "function": {"name": "f"}}], r"tool_calls\[0\] is not a function call"),
        ([{"function": {"name": "f"}}, {"function": {}}], r"tool_calls\[1\] has no function name"),
        ([{"function": {"name": 3}}], r"tool_calls\[0\] has no function name"),
    ],
)
def test_calls_of_the_wrong_shape_are_named(calls: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[1\]\.{words}"):
        normalise_messages([U, {**A, "tool_calls": calls}])


@pytest.mark.parametrize("tools", [{"type": "function"}, "f", ["f"], [print]])
def test_tools_of_the_wrong_shape_are_named(tools: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools(\[0\])? must be"):
        embedded().render([U], tools=tools)


def test_no_tools_are_no_tools() -> None:
    assert embedded().render([U], tools=[]) == embedded().render([U], tools=None) == embedded().render([U])


# What holds for all messages.

BLOCKS = st.text(max_size=5).map(lambda text: {"type": "text", "text": text})
CONTENT = st.one_of(st.text(max_size=5), st.lists(BLOCKS, max_size=2))
ARGUMENTS = st.sampled_from([None, "", "{}", '{"a": [1]}', {"a": {"b": 1}}])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user", "tool"]), "content": CONTENT}),
        ARGUMENTS.map(call),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT, "reasoning": st.text(max_size=5)}),
    ),
    min_size=1,
    max_size=6,
)


@given(MESSAGES)
@settings(deadline=None)
def test_normalising_changes_nothing_of_the_caller_and_is_done_after_once(messages: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(messages)
    once = normalise_messages(messages)
    kept = copy.deepcopy(once)
    assert normalise_messages(once) == kept
    embedded().render(messages, tools=[{"type": "function"}])
    assert messages == before


@given(MESSAGES)
@settings(deadline=None)
def test_after_normalising_only_the_first_message_is_a_system_message(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in normalise_messages(messages)]
    assert set(roles[:1]) <= {"system", "user", "assistant", "tool"}
    assert set(roles[1:]) <= {"user", "assistant", "tool"}
