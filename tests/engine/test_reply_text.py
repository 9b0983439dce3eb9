# SPDX-License-Identifier: Apache-2.0
"""From constructed tokens to chunks and a completion: parts, stop strings, reasons, counts. No device is needed.

The tokenizer is one of bytes, with the markers as tokens or without them.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_cases import ANSWERING, START, THINKING, TOOLS, call, tokens

from lily.reply_text import ReplyText, call_ids
from lily.run.reply import Token
from lily.sampling import SamplingParams
from lily.streaming import Completion, StreamChunk, ToolCallDelta
from lily.text.call_grammar import MARKERS
from lily.text.reply_parts import ReplyForm
from lily.text.tokenizer import Tokenizer

EDIT = call("edit", ("path", "a.py"), ("count", "3"))
LIST = call("list")
END = 256  # a control token without text
EDIT_ARGUMENTS = '{"path": "a.py", "count": 3}'


class Bytes:
    """A tokenizer whose ids are bytes, then END, the markers, and pieces of text that tests add."""

    def __init__(self, *, markers: bool = True) -> None:
        self.token_bytes = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>"]
        self._ids: dict[str, int] = {}
        if markers:
            for marker in MARKERS:
                self._ids[marker] = self.add(marker.encode())

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def add(self, text: bytes) -> int:
        self.token_bytes.append(text)
        return len(self.token_bytes) - 1

    def ids(self, text: str, *, seed: int | None = None) -> list[int]:
        """``text`` as bytes, or as tokens of several bytes; a marker is one token, if there are such."""
        draw, ids = random.Random(seed), []
        for piece in tokens(text) if self._ids else [text]:
            if piece in self._ids:
                ids.append(self._ids[piece])
                continue
            data = piece.encode()
            while data:
                size = 1 if seed is None else draw.randint(1, 12)
                ids.append(data[0] if size == 1 else self.add(data[:size]))
                data = data[size:]
        return ids


def reply(
    ids: list[int], *, tokenizer: Bytes, prompt: str = ANSWERING, tools: Any = TOOLS, ended: bool = True,
    chat: bool = True, stop_ids: frozenset[int] = frozenset({END}), **params: Any,
) -> tuple[list[StreamChunk], Completion]:  # fmt: skip
    """Pushes ``ids``, and then END if the model has ``ended``; otherwise the last one meets the limit."""
    sampling = SamplingParams(**{"seed": 1, **params})
    text = ReplyText(
        cast(Tokenizer, tokenizer), [1, 2, 3], sampling, hidden=frozenset({END}), stop_ids=stop_ids,
        form=ReplyForm.of(prompt, tools) if chat else None, cached=1, began=0.0,
    )  # fmt: skip
    chunks: list[StreamChunk] = []
    ids = [*ids, END] if ended else ids
    for i, id in enumerate(ids):
        token = Token(id, i, id in stop_ids, -0.5, ((id, -0.5),))
        ended_here = text.push(token, last=i + 1 == len(ids))
        chunks.append(text.chunk())
        assert ended_here == (chunks[-1].completion is not None)
        if chunks[-1].completion is not None:
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            check_joined(chunks, chunks[-1].completion)
            return chunks, chunks[-1].completion
    raise AssertionError("the reply has no end")


def check_joined(chunks: list[StreamChunk], done: Completion) -> None:
    """Chunks joined are the completion."""
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert ("".join(chunk.reasoning for chunk in chunks) or None) == done.reasoning
    assert [id for chunk in chunks for id in chunk.token_ids] == done.token_ids
    assert done.finish_reason == chunks[-1].finish_reason
    assert done.completion_tokens == len(done.token_ids) == len(chunks)
    for index, whole in enumerate(done.tool_calls):
        deltas = [delta for chunk in chunks for delta in chunk.tool_calls if delta.index == index]
        assert (deltas[0].id, deltas[0].name) == (whole.id, whole.name)
        assert all(delta.id is None and delta.name is None for delta in deltas[1:])
        assert "".join(delta.arguments for delta in deltas) == whole.arguments
        assert isinstance(json.loads(whole.arguments), dict)


def say(text: str, *, markers: bool = True, seed: int | None = None, **how: Any) -> Completion:
    tokenizer = Bytes(markers=markers)
    return reply(tokenizer.ids(text, seed=seed), tokenizer=tokenizer, **how)[1]


def seen(done: Completion) -> tuple[Any, ...]:
    """What does not depend on how a text is made into tokens."""
    return done.text, done.reasoning, done.tool_calls, done.finish_reason


THOUGHT = f"Hm.\n</think>\n\nI look.\n\n{EDIT}\n{LIST}"


@pytest.mark.parametrize("markers", [True, False])
def test_a_chat_comes_in_its_parts(markers: bool) -> None:
    done = say(THOUGHT, prompt=THINKING, markers=markers)
    assert (done.reasoning, done.text, done.finish_reason) == ("Hm.", "I look.", "tool_calls")
    assert [(one.name, one.arguments) for one in done.tool_calls] == [("edit", EDIT_ARGUMENTS), ("list", "{}")]
    for seed in range(20):
        assert seen(say(THOUGHT, prompt=THINKING, markers=markers, seed=seed)) == seen(done)


def test_a_plain_prompt_has_all_in_its_text() -> None:
    done = say(THOUGHT, chat=False, prompt=THINKING)
    assert (done.text, done.reasoning, done.tool_calls, done.finish_reason) == (THOUGHT, None, [], "stop")


def test_counts_and_logprobs_are_of_every_token() -> None:
    tokenizer = Bytes()
    ids = tokenizer.ids(THOUGHT)
    chunks, done = reply(ids, tokenizer=tokenizer, prompt=THINKING, logprobs=1)
    assert done.token_ids == [*ids, END]
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == done.logprobs
    assert (done.prompt_tokens, done.cached_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("text", "how", "reason"),
    [
        ("a", {}, "stop"),
        ("a", {"ended": False}, "length"),
        (EDIT, {}, "tool_calls"),
        (EDIT, {"ended": False}, "length"),
        (EDIT[:-20], {"ended": False}, "length"),
        (EDIT, {"tools": None}, "stop"),
        (f"{EDIT}\nabc", {"stop": ["b"]}, "stop"),
        (f"a {EDIT}", {"stop": ["a"]}, "stop"),
        (EDIT.removesuffix("</tool_call>"), {}, "tool_calls"),
        (EDIT[:-30], {}, "stop"),
    ],
    ids=range(10),
)
def test_finish_reasons(text: str, how: dict[str, Any], reason: str) -> None:
    assert say(text, **how).finish_reason == reason


@pytest.mark.parametrize("end", range(1, len(EDIT)))
def test_a_call_that_is_cut_off_is_none(end: int) -> None:
    tokenizer = Bytes()
    ids = tokenizer.ids(EDIT)[:end]
    done = reply(ids, tokenizer=tokenizer, ended=False)[1]
    assert done.finish_reason == "length"
    assert done.text == ""
    assert len(done.tool_calls) == (len(ids) == len(tokenizer.ids(EDIT)))


STOPS: list[tuple[str, dict[str, Any], str, str | None, int]] = [
    # reply, prompt and stops; text, reasoning, calls
    ("a STOP\n</think>\n\nb STOP c", {"prompt": THINKING, "stop": ["STOP"]}, "b ", "a STOP", 0),
    ("STOP", {"stop": ["STOP"]}, "", None, 0),
    (f"{call('edit', ('text', 'STOP'))}\nxSTOP", {"stop": ["STOP"]}, "x", None, 1),
    (f"a STOP\n\n{LIST}", {"stop": ["STOP"]}, "a ", None, 0),
    (f"a STOP\n\n{LIST}", {"stop": ["</tool_call>", "<function"]}, "a STOP", None, 1),
    (f"a ST{LIST}OP", {"stop": ["STOP"]}, "a STOP", None, 1),  # what a call divides is no stop string
    (f"a b{LIST}", {"stop": ["b", "bc"]}, "a ", None, 0),
    (f"a bc{LIST}", {"stop": ["bcd", "c"]}, "a b", None, 0),  # found only when the call rules the longer one out
    ("a\n\nb", {"stop": ["\n\n"]}, "a", None, 0),
    ("x\n</think>\n\na\n\nb", {"prompt": THINKING, "stop": ["\n\n"]}, "a", "x", 0),  # not the form's newlines
    ("never", {"prompt": THINKING, "stop": ["v"]}, "", "never", 0),
    (f"a {LIST}", {"stop": ["</tool_call>"], "tools": None}, "a " + LIST.removesuffix("</tool_call>"), None, 0),
    ("a ST", {"stop": ["STOP"]}, "a ST", None, 0),
    ("a ST", {"stop": ["STOP"], "ended": False}, "a ST", None, 0),
]


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("case", STOPS, ids=range(len(STOPS)))
def test_stop_strings_are_looked_for_in_the_content_alone(
    case: tuple[str, dict[str, Any], str, str | None, int], markers: bool
) -> None:
    text, how, content, reasoning, calls = case
    tokenizer = Bytes(markers=markers)
    chunks, done = reply(tokenizer.ids(text), tokenizer=tokenizer, **how)
    assert (done.text, done.reasoning, len(done.tool_calls)) == (content, reasoning, calls)
    assert len({delta.index for chunk in chunks for delta in chunk.tool_calls}) == calls  # none that begins after it
    for seed in range(20):
        assert seen(say(text, markers=markers, seed=seed, **how)) == seen(done)


def test_nothing_comes_after_a_stop_string_even_from_the_same_token() -> None:
    tokenizer = Bytes(markers=False)
    chunks, done = reply([tokenizer.add(f"a STOP b {LIST}".encode())], tokenizer=tokenizer, stop=["STOP"])
    assert (done.text, done.tool_calls, chunks[0].tool_calls) == ("a ", [], [])
    assert done.finish_reason == "stop"


def test_a_marker_inside_of_a_character_leaves_the_broken_character_before_it() -> None:
    tokenizer = Bytes()
    think_end = tokenizer.ids("</think>")
    for markers in (think_end, [0xC3, *think_end]):
        done = reply([*b"a\xf0\x9f", *markers, *b"b"], tokenizer=tokenizer, prompt=THINKING)[1]
        assert done.text == "b"
        assert done.reasoning is not None
        assert done.reasoning.rstrip("\ufffd") == "a"
        assert done.reasoning != "a"


def test_a_marker_that_ends_the_reply_is_no_marker() -> None:
    """``stop_token_ids`` with the end of a call: the call is complete all the same."""
    tokenizer = Bytes()
    ids = tokenizer.ids(EDIT)
    done = reply(ids, tokenizer=tokenizer, stop_ids=frozenset({END, ids[-1]}))[1]
    assert (done.token_ids, done.finish_reason) == (ids, "tool_calls")
    assert [one.arguments for one in done.tool_calls] == [EDIT_ARGUMENTS]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_ends_the_reply_has_no_text(marker: str) -> None:
    tokenizer = Bytes()
    ids = [65, *tokenizer.ids(marker)]
    done = reply(ids, tokenizer=tokenizer, stop_ids=frozenset({END, ids[-1]}))[1]
    assert (done.text, done.token_ids, done.finish_reason) == ("A", ids, "stop")


def test_a_token_gives_one_delta_of_each_call() -> None:
    tokenizer = Bytes(markers=False)
    chunks, _ = reply([tokenizer.add(f"{EDIT}\n{LIST}\n".encode())], tokenizer=tokenizer)
    got = [(delta.index, delta.name, delta.arguments) for delta in chunks[0].tool_calls]
    assert got == [(0, "edit", EDIT_ARGUMENTS), (1, "list", "{}")]


def test_ids_of_calls_repeat_with_the_request_and_with_nothing_else() -> None:
    first = say(f"{LIST}\n{LIST}").tool_calls
    assert all(one.id.startswith("call_") and len(one.id) == 29 for one in first)
    assert all(set(one.id[5:]) <= set("0123456789abcdef") for one in first)
    assert first == say(f"{LIST}\n{LIST}", seed=3).tool_calls  # of the tokens' sizes, not of the sampling
    ids = {call_ids(seed, prompt)(index) for seed in (0, 2**64 - 1) for prompt in ([1], [1, 2]) for index in (0, 1)}
    assert len(ids) == 8


def test_deltas_and_chunks_compare_and_convert() -> None:
    assert asdict(ToolCallDelta(0)) == {"index": 0, "id": None, "name": None, "arguments": ""}
    assert StreamChunk("a").reasoning == ""
    assert StreamChunk("a").tool_calls == []


PIECES = st.sampled_from(
    [*MARKERS, "a", "\n", "ST", "OP", "STOP", "é", EDIT, LIST, "<function=list>", "</function>", " "]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=15).map("".join), st.data())
def test_streamed_equals_not_streamed(text: str, data: st.DataObject) -> None:
    how = {
        "prompt": data.draw(st.sampled_from([THINKING, ANSWERING, START])),
        "markers": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from([TOOLS, None])),
        "stop": data.draw(st.sampled_from([(), ("STOP",), ("a", "OPa"), ("\n",)])),
    }
    seed = data.draw(st.integers(0, 2**32))
    assert seen(say(text, seed=seed, **how)) == seen(say(text, **how))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 260), max_size=60), st.booleans(), st.sampled_from([THINKING, ANSWERING]))
def test_tokens_of_any_kind_never_raise(ids: list[int], ended: bool, prompt: str) -> None:
    reply([*ids, 65], tokenizer=Bytes(), ended=ended, prompt=prompt, stop=["a"])
