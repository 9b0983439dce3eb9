# SPDX-License-Identifier: Apache-2.0
"""Chat templates: golden prompts of the real one, where templates come from, their options, and those that fail.

Not handled: messages before a template sees them (test_messages.py); what a template may do (test_sandbox.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chats import REAL, STRICT, A, S, T, U, call, embedded, needs_real, real

from lily.errors import CheckpointError, InvalidRequestError, LilyWarning
from lily.text.template import ChatTemplate, reply_start, starts_in_reasoning
from lily.text.tokenizer import Tokenizer

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
    assert embedded().available
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


THINKING, ANSWERING = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("prompt", "reply", "start"),
    [
        (ANSWERING, "Yes", "Yes"),
        (THINKING, "Yes", "\n</think>\n\nYes"),
        (THINKING, "<think>\nHm", "Hm"),
        (THINKING, "Hm\n</think>\n\nYes", "Hm\n</think>\n\nYes"),
        ("<|im_start|>assistant\n", "Yes", "Yes"),
    ],
)
def test_a_given_beginning_of_the_answer_stands_behind_the_reasoning(prompt: str, reply: str, start: str) -> None:
    assert reply_start(prompt, reply) == start
