# SPDX-License-Identifier: Apache-2.0
"""Replies split into reasoning, content and calls: always the same, however the text is chopped.

Where a tokenizer has the markers as tokens only these count; where it has not, their text does. Both are tested.
Not handled: which JSON a value becomes (test_call_arguments.py); stop strings (tests/engine/test_reply_text.py).
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from needs import REAL_DATA, real_tokenizer
from paths import EMBEDDED
from reply_cases import ANSWERING, START, THINKING, TOOLS, Split, call, chopped, choppings, split, tokens

from lily.text import call_grammar as grammar
from lily.text.call_grammar import MARKERS
from lily.text.detokenizer import Detokenizer
from lily.text.reply_parts import ReplyForm
from lily.text.template import ChatTemplate
from lily.text.tokenizer import Tokenizer

REAL = real_tokenizer()
needs_real = pytest.mark.skipif(REAL is None, reason=REAL_DATA)

LIST = call("list")
EDIT = call("edit", ("path", "a.py"), ("count", "3"))
EDITED = ("edit", {"path": "a.py", "count": 3})
ALONE: tuple[str, str, list[Any]] = ("", "", [])

# reply, reasoning, content, calls
ANSWERS: dict[str, tuple[str, str, str, list[Any]]] = {
    "nothing": ("", *ALONE),
    "text": ("Hello, there!", "", "Hello, there!", []),
    "newlines in the text": ("a\n\nb\n\n\nc", "", "a\n\nb\n\n\nc", []),
    "newlines at the end": ("a\n\n", "", "a\n\n", []),
    "newlines at the beginning": ("\n\na", "", "a", []),
    "newlines alone": ("\n\n", *ALONE),
    "more newlines than any form has": ("a" + "\n" * 200 + "b", "", "a" + "\n" * 200 + "b", []),
    "a call alone": (LIST, "", "", [("list", {})]),
    "text before a call": ("I look.\n\n" + EDIT, "", "I look.", [EDITED]),
    "text with a newline in it before a call": ("a\n\nb\n" + EDIT, "", "a\n\nb", [EDITED]),
    "two calls": (f"{EDIT}\n{LIST}", "", "", [EDITED, ("list", {})]),
    "three calls": (f"x\n\n{EDIT}\n{LIST}\n{EDIT}", "", "x", [EDITED, ("list", {}), EDITED]),
    "two calls with nothing between": (EDIT + LIST, "", "", [EDITED, ("list", {})]),
    "text between calls": (f"a\n\n{LIST}\nb\n{LIST}", "", "a\nb", [("list", {})] * 2),
    "text after a call": (f"{LIST}\n\nDone.", "", "Done.", [("list", {})]),
    "text before and after a call": (f"a\n\n{LIST}\n\nb\n", "", "a\n\nb\n", [("list", {})]),
    "newlines after a call": (f"a\n\n{LIST}\n\n", "", "a", [("list", {})]),
    "thinking that was switched off": ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    "thinking and a call though it was switched off": (f"<think>\nHm.\n</think>\n\n{LIST}", "Hm.", "", [("list", {})]),
}  # fmt: skip
THOUGHTS: dict[str, tuple[str, str, str, list[Any]]] = {
    "an answer": ("Hm.\nYes.\n</think>\n\nHello!", "Hm.\nYes.", "Hello!", []),
    "no thought": ("</think>\n\nHello!", "", "Hello!", []),
    "an empty thought": ("\n\n</think>\n\nHello!", "", "Hello!", []),
    "newlines around": ("\n\nHm.\n\n</think>\n\n\nHello!\n", "Hm.", "Hello!\n", []),
    "no newlines": ("Hm.</think>Hello!", "Hm.", "Hello!", []),
    "a call": (f"Hm.\n</think>\n\n{EDIT}", "Hm.", "", [EDITED]),
    "text and calls": (f"Hm.\n</think>\n\nI look.\n\n{EDIT}\n{LIST}", "Hm.", "I look.", [EDITED, ("list", {})]),
    "never closed": ("Hm.\n\nYes.\n", "Hm.\n\nYes.\n", "", []),
    "nothing": ("", *ALONE),
    "a call inside": (f"I could {LIST}\n or {EDIT} it.\n</think>\n\nNo.", f"I could {LIST}\n or {EDIT} it.", "No.", []),
    "a call inside that never closes": (LIST, LIST, "", []),
    "begun twice": ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    "two blocks": ("a\n</think>\n\n<think>\nb\n</think>\n\nc", "a\nb", "c", []),
    "a tag in the answer": ("a\n</think>\n\nThe tag <think> opens.", "a", "The tag <think> opens.", []),
    "its end in the answer": ("a\n</think>\n\nThe tag </think> ends.", "a", "The tag </think> ends.", []),
    "its beginning inside": ("The tag <think> opens.\n</think>\n\nb", "The tag <think> opens.", "b", []),
}  # fmt: skip
MENTIONS = [
    "Calls begin with <tool_call> and end with </tool_call>.",
    "<tool_call>",
    "a\n\n<tool_call>\n\nb",
    "<tool_call>\n<tool_call>\n<function=\n",
    "<tool_call>\n<function=edit>",
    "<tool_call>\n<function=edit> is how it begins, <parameter=path> goes on.",
    "<tool_call><function=list></function> is a form without its end.",
    "<tool_call>\n<functions=list>\n</functions>\n</tool_call>",
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>',
    "<tool_call>" + " " * 100 + "<function=list>\n</function>\n</tool_call>",
    "<tool_call>\n<function=" + "x" * 300 + ">\n</function>\n</tool_call>",
    "<function=list>\n</function>",
    "</tool_call>\n\na",
]
# What stands in a value, and what the string is.
VALUES = [
    "", " ", "a", "\n", "\na\n", "a\n\n\nb", "<", "</", "</p", "</parameter", "</parameters>", "a</parameter>b",
    "<parameter=", "<b>x</b> & <parameter name='y'>z</parameter>", "if (a < b && c > d) {\n\treturn \"\\n\";\n}",
    "</function>", "a\n</function>\nb", "</parameter>\n</function>\nmore of it", "<function=list>\n</function>",
    "<parameter=path>\nx", "<tool_call>", "</tool_call>",
    "The tags <tool_call> and </tool_call>, <think> and </think>.",
    "<tool_call>\n<function=list>", "\u2028\x00\x1b\ufffd\U0001f469\u200d\U0001f680",
    "Příliš žluťoučký 你好", "\\", '"', "null",
    "3", "{}", "\r\n", "a\r\n", "\t", "x" * 3000, "</parameter" * 50, "<" * 200,
]  # fmt: skip
PATH = call("edit").replace("</f", "<parameter=path>@</parameter>\n</f")
# A call with what models leave out or add, and the one that is meant.
LENIENT = {
    "no newlines at all": (
        "<tool_call><function=edit><parameter=path>a.py</parameter><parameter=count>3</parameter></function></tool_call>",
        EDITED,
    ),
    "a value without newlines": (PATH.replace("@", "a b"), ("edit", {"path": "a b"})),
    "a value without its last newline": (PATH.replace("@", "\na b"), ("edit", {"path": "a b"})),
    "spaces between tags": (re.sub("(?<=>)\n(?=<)", " \r\n\t", EDIT), EDITED),
    "no </parameter> at the end": (EDIT.replace("3\n</parameter>", "3"), EDITED),
    "no </function>": (EDIT.replace("</function>\n", ""), EDITED),
    "no </tool_call>": (EDIT.removesuffix("\n</tool_call>"), EDITED),
    "no </tool_call>, and a newline": (EDIT.removesuffix("</tool_call>"), EDITED),
    "no </tool_call> and no </parameter>": (
        EDIT.removesuffix("\n</tool_call>").replace("3\n</parameter>", "3"), EDITED
    ),
    "nothing after </parameter>": (EDIT.removesuffix("\n</function>\n</tool_call>"), EDITED),
    "only </tool_call> after a value": (EDIT.replace("</parameter>\n</function>\n", ""), EDITED),
    "a parameter twice": (call("edit", ("path", "a.py"), ("path", "b.py"), ("count", "3")), EDITED),
    "spaces in the tags": (EDIT.replace("=edit>", "=edit >").replace("=path>", "=path\t>"), EDITED),
}  # fmt: skip


def check(reply: str, prompt: str, want: Split, tools: Any = TOOLS, count: int = 20) -> None:
    """In every chopping, with markers as tokens and as text."""
    for spelled in (False, True):
        for pieces in choppings(reply, count, spelled=spelled):
            got = split(pieces, prompt=prompt, tools=tools, spelled=spelled)
            assert got == want, pieces


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    reply, reasoning, content, calls = ANSWERS[name]
    got = split(tokens(reply))
    assert (got.reasoning, got.content, got.parsed, got.cut) == (reasoning, content, calls, None)
    check(reply, ANSWERING, got)


@pytest.mark.parametrize("name", THOUGHTS)
def test_replies_that_begin_in_reasoning(name: str) -> None:
    reply, reasoning, content, calls = THOUGHTS[name]
    got = split(tokens(reply), prompt=THINKING)
    assert (got.reasoning, got.content, got.parsed, got.cut) == (reasoning, content, calls, None)
    check(reply, THINKING, got)


@pytest.mark.parametrize("mention", MENTIONS, ids=range(len(MENTIONS)))
def test_text_that_mentions_the_tags_stays_text(mention: str) -> None:
    for reply in (mention, f"a {mention}", f"a\n\n{mention}\n\nb"):
        got = split(tokens(reply))
        assert (got.content, got.calls, got.cut) == (reply, [], None)
        check(reply, ANSWERING, got, count=5)


@pytest.mark.parametrize("mention", MENTIONS, ids=range(len(MENTIONS)))
def test_a_call_after_a_mention_is_a_call(mention: str) -> None:
    got = split(tokens(f"{mention}.\n\n{EDIT}"))
    assert (got.content, got.parsed) == (f"{mention}.", [EDITED])


def test_spelled_tags_are_text_where_the_tokenizer_has_tokens_for_them() -> None:
    reply = f"<think>\n{EDIT}</think>"
    got = split([reply])
    assert (got.content, got.reasoning, got.calls) == (reply, "", [])


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("text", [EDIT, f"a\n\n{EDIT}\n{LIST}\n\n", *MENTIONS])
def test_without_tools_calls_are_text(tools: Any, text: str) -> None:
    got = split(tokens(text), tools=tools)
    assert (got.content, got.calls) == (text, [])
    check(text, ANSWERING, Split(content=text, order=["Content"]), tools=tools, count=5)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_hold_anything(value: str) -> None:
    reply = call("edit", ("path", value), ("text", value))
    got = split(tokens(reply))
    assert got.parsed == [("edit", {"path": value, "text": value})]
    if len(value) < 100:
        check(reply, ANSWERING, got, count=5)


@pytest.mark.parametrize("name", LENIENT)
def test_slips_of_models(name: str) -> None:
    """At the end of a reply, where tags may be missing, and where another call follows, if its end is clear then."""
    reply, want = LENIENT[name]
    for before in ("", "Text.\n\n", LIST + "\n"):
        got = split(tokens(before + reply))
        assert got.parsed[-1] == want
        assert got.cut is None
        check(before + reply, ANSWERING, got, count=5)


@pytest.mark.parametrize("reply", [EDIT.removesuffix("</tool_call>"), EDIT.replace("3\n</parameter>", "3"), EDIT])
def test_a_call_ends_where_the_next_one_begins(reply: str) -> None:
    got = split(tokens(f"{reply}\n{LIST}"))
    assert got.parsed == [EDITED, ("list", {})]
    check(f"{reply}\n{LIST}", ANSWERING, got, count=5)


def test_many_newlines_at_the_beginning_are_not_held_back_for_a_tag_that_may_come() -> None:
    reply = "\n" * 2000 + "a"
    assert split(list(reply), prompt=START).content == reply


def test_three_functions_in_one_pair_of_tags_are_three_calls() -> None:
    two = "<function=list>\n</function>\n<function=list>\n</function>\n</tool_call>"
    got = split(tokens(EDIT.removesuffix("</tool_call>") + two))
    assert got.parsed == [EDITED, ("list", {}), ("list", {})]
    check(EDIT.removesuffix("</tool_call>") + two, ANSWERING, got)


def test_two_functions_in_one_pair_of_tags_are_two_calls() -> None:
    reply = EDIT.replace(
        "\n</tool_call>", "\n<function=edit>\n<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>"
    )
    got = split(tokens(reply))
    assert got.parsed == [EDITED, ("edit", {"text": "b"})]
    check(reply, ANSWERING, got)


def test_the_tag_of_a_parameter_does_not_end_a_value() -> None:
    """Not even of one that the tool has and the call lacks: the value may be a text about calls."""
    value = "a\n<parameter=count>\n4"
    assert split(tokens(call("edit", ("path", value)))).parsed == [("edit", {"path": value})]


def test_a_call_that_is_open_when_the_model_ends_is_none() -> None:
    for reply in (EDIT[: EDIT.index("\n</parameter>")], EDIT[: EDIT.index("count")]):
        got = split(tokens(reply))
        assert (got.content, got.calls) == ("", [])


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("prompt", [ANSWERING, THINKING])
def test_a_reply_cut_anywhere_shows_the_beginning_of_the_whole_and_no_call_that_is_not_complete(
    prompt: str, spelled: bool
) -> None:
    second = call("edit", ("text", "x </para\n\ny"), ("options", "{}"), ("maybe", "nul"))
    text = f"First <b>.\n\n{EDIT}\n{second}\nEnd."
    reply = text if prompt == ANSWERING else f"Hm.\n\nWell.\n</think>\n\n{text}"
    pieces = chopped(reply, range(len(reply)), spelled=spelled)
    whole = split(pieces, prompt=prompt, spelled=spelled)
    assert len(whole.calls) == 2
    for end in range(len(pieces)):
        got = split(pieces[:end], prompt=prompt, ended=False, spelled=spelled)
        assert got.calls == whole.calls[: len(got.calls)]
        for some, all_of_it in ((got.reasoning, whole.reasoning), (got.content, whole.content)):
            assert all_of_it.startswith(some.rstrip("\n"))  # newlines may be the form's or the text's
        written = "".join(pieces[:end])
        assert len(got.calls) == written.count("</tool_call>")
        assert "<t" not in got.content
        assert "<f" not in got.content
        if got.cut is not None:
            name, arguments = whole.calls[len(got.calls)]
            assert got.cut[0] == name
            assert arguments.startswith(got.cut[1])
            assert got.cut[1] != arguments  # the last brace comes with the end


def test_a_limit_inside_of_reasoning_leaves_no_content() -> None:
    got = split(["Hm,", " I think\n"], prompt=THINKING, ended=False)
    assert (got.reasoning, got.content) == ("Hm, I think\n", "")


def test_strings_go_out_as_they_are_written() -> None:
    before, after = call("edit", ("text", "@")).split("@")
    pieces = [*tokens(before), "one ", "two ", "<three", "> four", *tokens(after)]
    for end, seen in ((-5, '{"text": "one'), (-4, '{"text": "one two '), (-2, '{"text": "one two <three> four')):
        got = split(pieces[:end], ended=False)
        assert got.cut is not None
        assert got.cut[1].startswith(seen)


# ---- where a reply begins
@pytest.mark.parametrize(
    ("prompt", "reply", "reasoning", "content"),
    [
        (THINKING, "\na", "a", ""),
        (START + "<think>", "\na", "a", ""),
        (THINKING + "Let me", "\nthink\n</think>\n\nb", "\nthink", "b"),  # the prompt has the beginning of the reply
        (ANSWERING, "\na", "", "a"),
        (ANSWERING + "Sure,", "\na", "", "\na"),
        (ANSWERING + "Sure,", "<think>", "", "<think>"),
        (START, "a", "", "a"),
        (START, "\na", "", "\na"),  # without a tag no newline is the form's
        (START, "<think>\na\n</think>\n\nb", "a", "b"),
        (START, "\n\n<think>\na\n</think>\n\nb", "a", "b"),
        (START + "Sure", "<think>", "", "<think>"),
        (START.replace("Hi", "What is <think>?"), "a", "", "a"),
        ("<think>\n", "a\n</think>\n\nb", "a", "b"),  # no marker of a turn
        ("", "\na", "", "\na"),
        (THINKING.replace("Hi", "</think>"), "a", "a", ""),
    ],
)
def test_the_rendered_prompt_says_where_the_reply_begins(prompt: str, reply: str, reasoning: str, content: str) -> None:
    got = split(tokens(reply), prompt=prompt)
    assert (got.reasoning, got.content) == (reasoning, content)
    check(reply, prompt, got)


def test_the_last_turn_is_enough_to_say_it() -> None:
    for prompt in (THINKING, ANSWERING, ANSWERING + "Sure"):
        assert ReplyForm.of(prompt[prompt.rindex("<|im_start|>") :]) == ReplyForm.of(prompt)


@pytest.mark.parametrize(
    "tool",
    [
        {},
        {"function": 3},
        {"function": {}},
        {"name": 4},
        {"name": "edit", "parameters": []},
        {"function": {"name": "edit"}},
    ],
    ids=str,
)
def test_tools_of_any_form_are_taken(tool: dict[str, Any]) -> None:
    got = split(tokens(call("edit", ("count", "3"))), tools=[tool])
    assert got.parsed == [("edit", {"count": 3})]


def test_a_tool_may_stand_without_its_wrapper() -> None:
    got = split(tokens(call("edit", ("path", "3"))), tools=[TOOLS[0]["function"]])
    assert got.parsed == [("edit", {"path": "3"})]


# ---- properties
FRAGMENTS = st.sampled_from(
    [*MARKERS, "<function=edit>", "<function=list>", "</function>", "<parameter=path>", "<parameter=count>",
     "<parameter=maybe>",
     "</parameter>", "<parameter=", "</", "<", ">", "\n", "\n\n", " ", "a", "nul", "null", "12", "{", '"', "\\", "é",
     "\U0001f469", EDIT, LIST, "\n" * 70, " " * 70]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=25).map("".join), st.data(), st.sampled_from([ANSWERING, THINKING, START]))
def test_streamed_equals_not_streamed(reply: str, data: st.DataObject, prompt: str) -> None:
    spelled, ended = data.draw(st.booleans()), data.draw(st.booleans())
    tools = data.draw(st.sampled_from([TOOLS, None]))
    how = {"prompt": prompt, "ended": ended, "spelled": spelled, "tools": tools}
    whole = split([reply] if spelled else tokens(reply), **how)
    cuts = data.draw(st.lists(st.integers(0, len(reply))))
    got = split(chopped(reply, cuts, spelled=spelled), **how)
    assert (got.reasoning, got.content, got.calls, got.ids) == (whole.reasoning, whole.content, whole.calls, whole.ids)
    assert got.order == whole.order
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)
    if tools is None:
        given = re.sub("\n|</?think>", "", reply)
        assert re.sub("\n|</?think>", "", whole.reasoning + whole.content) == given  # nothing is lost but the form


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=12) | st.sampled_from(MARKERS).map(str.encode) | FRAGMENTS.map(str.encode)),
    st.booleans(),
)
@example([b"\xf0", b"<tool_call>", b"\x9f"], False)
def test_bytes_of_any_kind_never_raise(pieces: list[bytes], ended: bool) -> None:
    texts = Detokenizer(pieces)
    got = split([*(texts.push(i) for i in range(len(pieces))), texts.flush()], ended=ended)
    for _, arguments in got.calls:
        json.loads(arguments)


def test_a_long_reply_takes_time_in_proportion_to_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the characters that are looked at: what waits is looked at again with each piece, and is bounded."""
    seen = 0
    verdict = grammar.Ahead.at

    def counted(self: grammar.Ahead, text: str, place: int) -> bool | None:
        nonlocal seen
        seen += min(len(text) - place, grammar.MAX_AHEAD)
        return verdict(self, text, place)

    monkeypatch.setattr(grammar.Ahead, "at", counted)
    value = "for (x </parameter>; y < 3)\n" * 500
    split(chopped(call("edit", ("text", value)), range(0, 15_000, 3), spelled=False))
    assert 0 < seen < 200 * len(value)


# ---- with templates and tokenizers
@cache
def chat(real: bool) -> tuple[ChatTemplate, Tokenizer]:
    folder = REAL if real else EMBEDDED
    assert folder is not None
    return ChatTemplate.from_dir(folder), Tokenizer.from_dir(folder, 248_320 if real else 4096)


def replied(real: bool, message: dict[str, Any], *, pieces: random.Random | None = None) -> Split:
    """The reply that a template writes of ``message``, made into tokens and split."""
    template, tokenizer = chat(real)
    turns = [{"role": "user", "content": "Hi"}]
    prompt = template.render(turns, tools=TOOLS)
    text = template.render([*turns, message], tools=TOOLS, add_generation_prompt=False)
    assert text.startswith(prompt)
    reply = text.removeprefix(prompt).removesuffix("<|im_end|>\n")
    ids = tokenizer.encode(reply)
    markers = {tokenizer.id_of(marker): marker for marker in MARKERS}
    assert None not in markers
    texts = Detokenizer(tokenizer.token_bytes)
    shown = [texts.push(id) for id in ids] + [texts.flush()]
    assert all(text == markers[id] for id, text in zip(ids, shown, strict=False) if id in markers)
    return split(shown, prompt=prompt)


def assistant(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    tool_calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": tool_calls}


MESSAGES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("", "Hello!", []),
    ("Hm.\n\nWell.", "Hello!\n\nBye!", []),
    ("Hm.", "", [("list", {})]),
    ("Hm.", "I look.", [("edit", {"path": "a b.py", "count": 3, "ratio": 0.5, "deep": True}), ("list", {})]),
    ("", "", [("edit", {"items": ["a", "</parameter>"], "options": {"a": {"b": None}}, "none": None, "maybe": None})]),
    ("", "x", [("edit", {"text": value}) for value in VALUES]),
    ("", "", [("edit", {"new": 1}), ("unknown", {"x": [1, 2], "y": "z", "z": True})]),
]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=needs_real)])
@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_calls_that_a_template_writes_are_read_back(
    real: bool, message: tuple[str, str, list[tuple[str, dict[str, Any]]]]
) -> None:
    got = replied(real, assistant(*message))
    assert (got.reasoning, got.content, got.parsed, got.cut) == (*message, None)


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.lists(FRAGMENTS.filter(lambda f: f not in (EDIT, LIST, "</parameter>", "</function>")), max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": st.text(),
        "text": TEXTS.map("".join),
        "count": st.integers(-(2**60), 2**60),
        "ratio": NUMBERS,
        "deep": st.booleans(),
        "items": st.lists(JSON_VALUES, max_size=3),
        "options": st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3),
        "none": st.none(),
    },
)  # fmt: skip


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=needs_real)])
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.just("edit"), ARGUMENTS), max_size=3))
def test_drawn_calls_are_read_back(real: bool, calls: list[tuple[str, dict[str, Any]]]) -> None:
    normalise = chat(real)[1].decode
    encode = chat(real)[1].encode

    def normal(value: Any) -> Any:
        """As the tokenizer normalises text."""
        if isinstance(value, str):
            return normalise(encode(value))
        return value

    def drawn_normal(arguments: dict[str, Any]) -> bool:
        text = json.dumps(arguments, ensure_ascii=False)
        return bool(normal(text) == text)

    if all(drawn_normal(arguments) for _, arguments in calls):
        assert replied(real, assistant("", "", calls)).parsed == calls
