# SPDX-License-Identifier: Apache-2.0
"""Chats: golden prompts of the real template, the table of message forms, and templates that fail."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from needs import REAL_DATA, real_tokenizer
from paths import EMBEDDED

from lily.errors import CheckpointError, InvalidRequestError, LilyWarning
from lily.text import sandbox
from lily.text.template import ChatTemplate, normalise_messages, starts_in_reasoning
from lily.text.tokenizer import Tokenizer

REAL = real_tokenizer()

needs_real = pytest.mark.skipif(REAL is None, reason=REAL_DATA)

# Refuses what the real template refuses, in the same words, so that these cases run without it.
STRICT = """
{%- if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '[' + m.role + ':' + m.content + ']' }}
{%- endfor %}
"""

S = {"role": "system", "content": "S"}
U = {"role": "user", "content": "U"}
A = {"role": "assistant", "content": "A"}
T = {"role": "tool", "content": "T"}


@cache
def real() -> ChatTemplate:
    assert REAL is not None
    return ChatTemplate.from_dir(REAL)


@cache
def embedded() -> ChatTemplate:
    return ChatTemplate.from_dir(EMBEDDED)


def call(arguments: Any = ..., name: Any = "f") -> dict[str, Any]:
    function = {"name": name} if arguments is ... else {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def contents(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in normalise_messages(messages)]


# The real template.


@needs_real
def test_real_template_gives_the_golden_chats_and_ids() -> None:
    assert REAL is not None
    entries = json.loads((REAL / "golden.json").read_text(encoding="utf-8"))["chat"]
    tokenizer = Tokenizer.from_dir(REAL, 248_320)
    assert len(entries) == 8
    for entry in entries:
        prompt = real().render(
            entry["messages"],
            tools=entry.get("tools"),
            add_generation_prompt=entry.get("add", True),
            **entry.get("kw", {}),
        )
        assert prompt == entry["text"], entry["name"]
        assert tokenizer.encode(prompt) == entry["ids"], entry["name"]


@needs_real
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([S], "No user query found in messages."),
        ([S, A], "No user query found in messages."),
        ([T], "No user query found in messages."),
        ([], "messages is empty"),
    ],
)
def test_real_template_refuses_in_its_own_words(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        real().render(messages)


@needs_real
@pytest.mark.parametrize("messages", [[S, S, U], [S, U, A, S, U], [{**S, "role": "developer"}, U], [S, U, A, S]])
def test_real_template_accepts_system_messages_anywhere(messages: list[dict[str, Any]]) -> None:
    prompt = real().render(messages, add_generation_prompt=False)
    assert prompt.startswith("<|im_start|>system\nS")
    assert prompt.count("S") == sum(message["content"] == "S" for message in messages)


@needs_real
def test_real_template_renders_argument_strings_as_it_renders_mappings() -> None:
    arguments = {"city": "Plzeň", "days": 2, "deep": {"x": [1, None, True]}}
    chats = [[U, call(form), T] for form in (arguments, json.dumps(arguments))]
    first, second = map(real().render, chats)
    assert first == second
    assert "<parameter=city>\nPlzeň\n</parameter>" in first
    assert '<parameter=deep>\n{"x": [1, null, true]}\n</parameter>' in first


@needs_real
def test_real_template_renders_text_blocks_as_one_string() -> None:
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert real().render([{**U, "content": blocks}]) == real().render([{**U, "content": "one two"}])


@needs_real
def test_real_template_passes_thinking_options_through() -> None:
    chat = [U, {**A, "reasoning_content": "R"}, U]
    assert "R" not in real().render(chat)
    assert "<think>\nR\n</think>\n\nA" in real().render(chat, preserve_thinking=True)
    assert starts_in_reasoning(real().render(chat))
    assert not starts_in_reasoning(real().render(chat, enable_thinking=False))


# The embedded model's template.


def test_embedded_template_renders_a_chat_with_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "š <&> '", "parameters": {}}}]
    chat = [S, U, {**call('{"a": 1, "b": "x"}'), "reasoning": "R"}, T, A, U]
    prompt = embedded().render(chat, tools=tools)
    described = '{"type": "function", "function": {"name": "add", "description": "š <&> \'", "parameters": {}}}'
    assert f"<tools>\n{described}\n</tools>" in prompt
    called = "<tool_call>\n<function=add>".replace("add", "f")
    assert (
        f"<|im_start|>assistant\n{called}\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n" in prompt
    )
    assert "<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\nA" in prompt
    assert prompt.endswith("<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_embedded_template_opens_and_closes_thinking() -> None:
    assert starts_in_reasoning(embedded().render([U]))
    assert not starts_in_reasoning(embedded().render([U], enable_thinking=False))
    assert not starts_in_reasoning(embedded().render([U], add_generation_prompt=False))


# The files.


def test_a_checkpoint_without_template_says_so(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path)
    assert not template.available
    assert template.notes == ("no chat template: the prompt is continued as it is",)
    assert embedded().notes == ()
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        template.render([U])


def test_a_template_that_cannot_be_read_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=rf"chat_template\.jinja: {words}"):
            ChatTemplate.from_dir(tmp_path)
        file.unlink()

    file.symlink_to(tmp_path / "blobs" / "gone")
    refused("is a link to a missing file")
    os.mkfifo(file)
    refused("is not a regular file")
    file.symlink_to("/dev/zero")
    refused("is not a regular file")
    file.write_bytes(b" " * ((1 << 20) + 1))
    refused("1048577 bytes, expected at most 1048576")
    file.write_bytes(b"\xff")
    refused("cannot be read")


# What a template may do.

# Each of them runs for hours, or fills the memory, where its work is not counted.
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without a body": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a loop in itself": "{% for x in [[1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) if loop.depth < 60 }}{% endfor %}",
    "a macro in itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a long body": "{% for i in range(99999) %}" + "{{ i }}" * 2000 + "{% endfor %}",
    "loops in filters": "{% for i in range(99999) %}{% set y = range(99999) | map('string') | list %}{% endfor %}",
    "loops in select": "{% for i in range(99999) %}{% set y = range(99999) | select('eq', 3) | list %}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set y = range(99999) | sum %}{% endfor %}",
    "sorting": "{% set x = ['b', 'a'] * 50000 %}{% for i in range(99999) %}{% set y = x | sort %}{% endfor %}",
    "copies": "{% set x = [1] * 100000 %}{% for i in range(99999) %}{% set y = x[:] %}{% endfor %}",
    "searching": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% set y = 'b' in x %}{% endfor %}",
    "counting": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% set y = x.count('b') %}{% endfor %}",
    "output": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 9 }}",
    "repetition of a list": "{% set x = [1] * 10 ** 9 %}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joined text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled output": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width among the values": "{{ '%*d' % (1000000000, 1) }}",
    "a width in format": "{{ '{:1000000000}'.format(1) }}",
    "a width among the values of format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a width in a filter": "{{ ['%1000000000d'] | map('format', 1) | join }}",
    "a value in many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 100000) | replace('', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "the filter join": "{{ (['a'] * 100000) | join('b' * 100000) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "tojson": "{{ ([1] * 100000) | tojson(indent=100000) }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "batch": "{{ [1] | batch(10 ** 8, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10 ** 8) | list | length }}",
    "a sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "round": "{{ 1 | round(-10 ** 8) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) | length }}",
    "marked text": "{{ ('a' | safe) * 10 ** 9 }}",
    # Every place of a text is compared with all of the argument.
    **{name: f"{{{{ ('a' * 100000).{name}('b' * 100000 ~ 'a') }}}}" for name in ("strip", "lstrip", "rstrip")},
    **{
        name: f"{{% set x = 'a' * 50000 %}}{{{{ ('a' * 200000).{name}(x ~ 'b' ~ x) }}}}"
        for name in ("rfind", "rindex", "rpartition", "rsplit")
    },
    "trim": "{{ ('a' * 100000) | trim('b' * 100000 ~ 'a') }}",
}

LISTS = (
    "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
DEEP = "{% set ns = namespace(x=('a',)) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}"
NESTED = {
    "written": LISTS + "{{ ns.x }}",
    "as JSON": LISTS + "{{ ns.x | tojson }}",
    "compared": LISTS + "{{ ns.x == ns.y }}",
    "searched": LISTS + "{{ ns.x in [ns.y] }}",
    "tested": LISTS + "{{ ns.x is eq ns.y }}",
    "joined": LISTS + "{{ 'a' ~ ns.x }}",
    "formatted": LISTS + "{{ '%s' % (ns.x,) }}{{ '{}'.format(ns.x) }}",
    "as a key": TUPLES + "{{ {ns.x: 1} }}",
    "looked up": TUPLES + "{{ {1: 2}[ns.x] }}",
    "got": TUPLES + "{{ {1: 2}.get(ns.x) }}",
    "asked for": TUPLES + "{{ ns.x in {1: 2} }}",
    "deep, written": DEEP + "{{ ns.x }}",
    "deep, as a key": DEEP + "{{ {ns.x: 1} }}",
}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the real bounds, reached in a hundredth of the time."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 24)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("source", (ENDLESS | NESTED).values(), ids=(ENDLESS | NESTED).keys())
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^chat template: rendering these messages takes") as caught:
        ChatTemplate(source).render([U])
    assert len(str(caught.value)) <= 500


def test_the_bounds_themselves_stop_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="takes more than 20,000,000 steps"):
        ChatTemplate(ENDLESS["loops"]).render([U])
    with pytest.raises(InvalidRequestError, match="takes more than 268,435,456 characters of text"):
        ChatTemplate(ENDLESS["repetition"]).render([U])


@pytest.mark.parametrize("template", [embedded, pytest.param(real, marks=needs_real)])
def test_the_longest_chats_stay_far_below_the_bounds(
    monkeypatch: pytest.MonkeyPatch, template: Callable[[], ChatTemplate]
) -> None:
    turn = [
        U,
        {**call('{"a": 1, "b": [1, 2]}'), "reasoning": "R"},
        T,
        {**A, "content": "<think>\nR\n</think>\n\n" + "word " * 99},
    ]
    template()
    monkeypatch.setattr(sandbox, "MAX_STEPS", sandbox.MAX_STEPS // 5)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", sandbox.MAX_CHARACTERS // 10)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"p": list(range(50))}}}] * 100
    assert template().render([S, *turn * 2500, U], tools=tools).count("<|im_end|>") > 7000


def test_counting_changes_no_text() -> None:
    source = (
        "{% macro m(x) %}<{{ x | trim }}>{% endmacro %}"
        "{% for x in xs if x != 2 %}{{ loop.index ~ x }}{{ m(' a ' + 'b') }}"
        "{% else %}none{% endfor %}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 'ab' * 2 }}{{ '%03d|%s' % (5, 'x') }}"
        "{{ '{:>4}{!r}'.format('a', 'b') }}{{ 'a,b'.split(',') | join('+') }}{{ [3, 1] | sort }}{{ 'abc'[::-1] }}"
        "{{ {'a': 1}.items() | list }}{{ 'a' in 'abc' }}{{ [1] + [2] }}{{ 'x' | center(5) }}{{ (1, 2) in {(1, 2): 3} }}"
        "{% set y %}{{ 1 }}{{ 2 }}{% endset %}{{ y }}{{ xs | map('string') | join }}{{ {'b': 1} | tojson }}"
        "{% block c %}[{{ xs | sum }}]{% endblock %}{{ self.c() }}{{ xs | batch(2) | list }}{{ 2.5 | round | int }}"
    )
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = lambda value: json.dumps(value)
    assert ChatTemplate(source).render([U], xs=[1, 2, 3]) == plain.from_string(source).render(xs=[1, 2, 3])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ ''['__class__'].mro() }}",
        "{{ (''|attr('__class__')).mro() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        assert ChatTemplate(source).render([U]) == ""
    except InvalidRequestError as error:
        assert "SecurityError" in str(error)  # noqa: PT017 (either will do)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y %}" * 22 + "{% endfor %}" * 22,
        "{% if x %}" * 120 + "{% endif %}" * 120,
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ x | no_such_filter }}",
        "{% include 'a' %}{% for %}",
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"not a valid template: .*; download it again") as caught:
        ChatTemplate(source, origin="folder/chat_template.jinja")
    assert str(caught.value).startswith("folder/chat_template.jinja: ")
    assert "\n" not in str(caught.value)


# Options.


def test_an_option_that_the_template_does_not_mention_is_warned_of() -> None:
    with pytest.warns(
        LilyWarning, match="does not mention 'enable_thinkng', which has no effect; it knows 'enable_thinking'"
    ):
        embedded().render([U], enable_thinkng=False)


@pytest.mark.parametrize("value", ["false", "true", "", 0, []])
@pytest.mark.parametrize("template", [embedded, pytest.param(real, marks=needs_real)])
def test_an_option_that_is_a_flag_must_be_true_or_false(template: Callable[[], ChatTemplate], value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"enable_thinking is .* asks it for true or false"):
        template().render([U], enable_thinking=value)
    for flag in (True, False, None):
        template().render([U], enable_thinking=flag)


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("{% if x %}{% endif %}", True),
        ("{{ 'a' if not x and y else 'b' }}", True),
        ("{% if x is defined and x is false %}{% endif %}", True),
        ("{% if x == true %}{% endif %}", True),
        ("{% set x = x | default(true) %}", True),
        ("{% if x %}{{ x }}{% endif %}", False),
        ("{% if x == 'high' %}{% endif %}", False),
        ("{% if x is defined %}{% set y = x %}{% endif %}", False),
        ("{% for a in x %}{% endfor %}{% if x %}{% endif %}", False),
        ("{{ x | default('low') }}", False),
        ("{% if x in ('a', 'b') %}{% endif %}", False),
    ],
)
def test_flags_are_told_from_other_options_by_their_use(source: str, flag: bool) -> None:
    template = ChatTemplate(source)
    if flag:
        with pytest.raises(InvalidRequestError, match="template option x is 'text'"):
            template.render([U], x="text")
    else:
        template.render([U], x="text")


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


# Whether the reply starts inside of reasoning.


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nI began alread", True),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nyes</think>\n\nThe answ", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n", False),
        ("<|im_start|>user\nwhat is </think>?<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("a plain prompt", False),
        ("a plain prompt <think>", True),
        ("", False),
    ],
)
def test_reasoning_is_open_only_if_the_last_turn_left_it_open(prompt: str, expected: bool) -> None:
    assert starts_in_reasoning(prompt) is expected


# Where templates come from, and what they may do.


def config_dir(folder: Path, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    config_dir(tmp_path, chat_template="config")
    assert ChatTemplate.from_dir(tmp_path).render([U]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert ChatTemplate.from_dir(tmp_path).render([U]) == "file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "usual"}]
    assert ChatTemplate.from_dir(config_dir(tmp_path, chat_template=named)).render([U]) == "usual"
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is neither"):
        ChatTemplate.from_dir(config_dir(tmp_path, chat_template=named[:1]))


def test_without_a_template_only_chatting_fails(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path)
    assert not template.available
    assert ChatTemplate.from_dir(EMBEDDED).available
    with pytest.raises(InvalidRequestError, match=r"has no chat template .* give a plain prompt"):
        template.render([U])


@pytest.mark.parametrize("source", ["a\n{% if %}", "\n{{ x | nofilter }}", "\n{% for x in y %}"])
def test_a_template_that_is_not_valid_is_refused_with_its_line(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: line 2: not a valid template"):
        ChatTemplate.from_dir(tmp_path)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.from_dir(tmp_path)


def test_a_templates_refusal_is_passed_on_in_its_words() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: No user query found in messages"):
        ChatTemplate(STRICT).render([S, A])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ range(999999999) | list }}",
        "{{ messages | tojson(indent={}) }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_clear_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template cannot render these messages: "):
        ChatTemplate(source).render([U])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': 'é<&\\'>', 'a': [1, none]} | tojson }}", '{"b": "é<&\'>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}y", "x1y"),
        ("  {% if true %}\nline\n  {% endif %}\nend", "line\nend"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ eos_token }}{{ bos_token is defined }}", "<|im_end|>False"),
        ("{{ extra }}{{ add_generation_prompt }}{{ tools }}", "xTrueNone"),
    ],
)
def test_templates_find_the_names_and_settings_they_rely_on(source: str, expected: str) -> None:
    template = ChatTemplate(source, special_tokens={"eos_token": "<|im_end|>"})
    options = {"extra": "x"} if "extra" in source else {}
    assert template.render([U], **options) == expected


def test_special_tokens_of_the_config_are_known_to_the_template(tmp_path: Path) -> None:
    config_dir(
        tmp_path,
        eos_token={"content": "<e>"},
        pad_token="<p>",
        bos_token=None,
        chat_template="{{eos_token}}{{pad_token}}",
    )
    assert ChatTemplate.from_dir(tmp_path).render([U]) == "<e><p>"


def test_template_options_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequestError, match="'messages' cannot be set"):
        embedded().render([U], messages=[A])


def test_many_threads_render_what_one_renders() -> None:
    chats = [[{**U, "content": f"number {number}"}] for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(embedded().render, chats)) == [embedded().render(chat) for chat in chats]


def test_the_options_of_a_template_are_what_it_reads_beside_what_it_is_given() -> None:
    template = ChatTemplate("{{ messages }}{{ tools }}{{ eos_token }}{% if enable_thinking %}{{ name }}{% endif %}")
    assert template.options == {"enable_thinking", "name"}
    assert ChatTemplate(None).options == frozenset()
