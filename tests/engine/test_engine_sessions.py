# SPDX-License-Identifier: Apache-2.0
"""Conversations: what is remembered, what is reused, and that reuse changes no reply.

Every turn is compared with the same messages on an engine that remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_device import Target, current, sweep
from engine_harness import current_state, failing_at, message_of, open_engine, policy, sequence_of
from models import tiny_model

from lily.engine import Completion, Engine
from lily.errors import ContextLengthError, DeviceError, InvalidRequestError
from lily.run.reply import Reply
from lily.session import Session

NO_THINKING = {"enable_thinking": False}
SYSTEM = "You are a friendly helper."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def engine(device: Target) -> Iterator[Engine]:
    with policy(message_gap=1), open_engine(device.pick(None, tiny_model()), max_context=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold_engine(device: Target) -> Iterator[Engine]:
    with policy(message_gap=1), open_engine(device.pick(None, tiny_model()), max_context=2048) as engine:
        yield engine


def greedy(**how: Any) -> dict[str, Any]:
    """Sampling of a turn; of few tokens where they take long."""
    return {"temperature": 0, "max_tokens": current().pick(24, 3), **how}


def cold_reply(engine: Engine, messages: list[dict[str, Any]], **how: Any) -> Completion:
    sequence_of(engine).reset()
    reply = engine.chat(messages, **greedy(**how))
    assert reply.cached_tokens == 0
    return reply


def send(session: Session, cold: Engine, text: str, **how: Any) -> Completion:
    """One turn, held to the cold engine's."""
    before = [dict(m) for m in session.messages]
    how = greedy(logprobs=3, **how)
    got = session.send(text, **how)
    cold_how = {"template_kwargs": session.template_kwargs, **how}
    want = cold_reply(cold, [*before, {"role": "user", "content": text}], **cold_how)
    assert (got.text, got.token_ids, got.logprobs) == (want.text, want.token_ids, want.logprobs)
    assert current_state(session.engine) == current_state(cold)
    assert session.messages[-1] == message_of(got)
    return got


def prompt_before(session: Session) -> list[int]:
    """Tokens of the last turn's prompt."""
    return session.engine.render_chat(session.messages[:-1], template_kwargs=session.template_kwargs)


def message_start(engine: Engine) -> int:
    id = engine.tokenizer.id_of("<|im_start|>")
    assert id is not None
    return id


# ---- reuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", sweep([NO_THINKING, {}], NO_THINKING), ids=str)
def test_turns_reuse_the_conversation_so_far(engine, cold_engine, device, thinking):
    """All that the template leaves as it was is reused: up to the start of the last reply."""
    session = engine.session(system=SYSTEM, template_kwargs=thinking)
    send(session, cold_engine, "My name is Tom.")
    for text in ("What is my name?", "Tell me a story about a cat.", "And what happened then?")[: device.pick(3, 2)]:
        last = prompt_before(session)
        reply_start = len(last) - 1 - last[::-1].index(message_start(engine))
        got = send(session, cold_engine, text)
        assert got.cached_tokens >= reply_start
        assert got.prompt_tokens - got.cached_tokens < device.pick(80, 150)  # the last reply and the new message


def test_prompt_that_continues_the_whole_last_turn_is_not_run_again(engine, cold_engine, device):
    """Where nothing is rendered anew, cached_tokens covers the whole prompt of the turn before and its reply.

    Up to the start of that reply where a state made by decode steps is not that of a cold run.
    """
    prompt = engine.render_chat([{"role": "user", "content": "Hello!"}], template_kwargs=NO_THINKING)
    reply = engine.generate(prompt, **greedy())
    longer = prompt + reply.token_ids + engine.tokenizer.encode("\n<|im_start|>user\nAnd you?<|im_end|>\n")
    got = engine.generate(longer, **greedy())
    reply_start = len(prompt) - 1 - prompt[::-1].index(message_start(engine))
    assert got.cached_tokens >= (len(prompt) + reply.completion_tokens - 1 if device.exact else reply_start)
    sequence_of(cold_engine).reset()
    assert got.token_ids == cold_engine.generate(longer, **greedy()).token_ids


ENDINGS: list[dict[str, Any]] = [
    {"max_tokens": 3}, {"stop": ["e"]}, {"stop": ["he", "a "]}, {"max_tokens": 60}, {"stop_token_ids": [13, 11]},
]  # fmt: skip


@pytest.mark.parametrize("ending", sweep(ENDINGS, ENDINGS[1]), ids=str)
def test_turn_after_every_kind_of_ending(engine, cold_engine, ending):
    """Length, stop string, end of sequence, stop id: what was run is there for the next turn, and only that."""
    session = engine.session(system=SYSTEM, template_kwargs=NO_THINKING)
    send(session, cold_engine, "Tell me a story about a dog.", **ending)
    got = send(session, cold_engine, "Go on.")
    assert got.cached_tokens > 20


@pytest.mark.parametrize("read", sweep([0, 1, 2, 5], 0, 2))
def test_turn_after_a_cancelled_reply(engine, cold_engine, read):
    session = engine.session(template_kwargs=NO_THINKING)
    stream = session.stream("Tell me a story about a bird.", **greedy(max_tokens=24))
    shown = "".join(next(stream).text for _ in range(read))
    stream.close()
    if read:
        assert session.messages[1:] == [{"role": "assistant", "content": shown}]
    else:
        assert session.messages == []
    send(session, cold_engine, "Now one about a fish.")


def test_edited_message_and_regenerated_reply(engine, cold_engine, device):
    session = engine.session(system=SYSTEM, template_kwargs=NO_THINKING)
    send(session, cold_engine, "My dog is called Rex.")
    send(session, cold_engine, "What is he called?")
    del session.messages[-2:]
    got = send(session, cold_engine, "What is my cat called?")
    assert got.cached_tokens > 20
    del session.messages[-2:]
    again = send(session, cold_engine, "What is my cat called?")
    assert again.cached_tokens >= got.cached_tokens
    assert again.text == got.text
    if device.emulated:  # long enough
        return
    session.messages[1]["content"] = "My dog is called Max."
    send(session, cold_engine, "And my dog?")


def test_two_conversations_in_turn(engine, cold_engine, device):
    """One engine holds one sequence: another conversation may cost time, never correctness."""
    a, b = (engine.session(system=s, template_kwargs=NO_THINKING) for s in (SYSTEM, None))
    for text in ("Hello, I am Ann.", "What is my name?", "Thank you.")[: device.pick(3, 2)]:
        send(a, cold_engine, text)
        send(b, cold_engine, text.replace("Ann", "Ben"))
    assert a.messages[1]["content"] != b.messages[0]["content"]


@pytest.mark.sweep  # the tools alone are some hundred tokens
def test_tools_are_not_forgotten_after_a_cache_hit(engine, cold_engine, device):
    """Greedy text with tools, byte for byte."""
    session = engine.session(template_kwargs=NO_THINKING)
    for text in ("What is the weather in Paris?", "And in Rome?"):
        got = send(session, cold_engine, text, tools=TOOLS, max_tokens=device.pick(60, 4))
    assert got.cached_tokens > 50
    if not device.emulated:  # there random-tiny replies
        calls = [call for message in session.messages for call in message.get("tool_calls", ())]
        assert "get_weather" in [call["function"]["name"] for call in calls]


def test_context_that_fills_up_during_a_conversation(device):
    room = device.pick(100, 64)
    with open_engine(tiny_model(), max_context=room) as engine, open_engine(tiny_model(), max_context=room) as cold:
        session = engine.session()
        how = {"max_tokens": device.pick(40, 12), "ignore_eos": True}
        while len(engine.render_chat([*session.messages, {"role": "user", "content": "abc"}])) < room:
            send(session, cold, "abc", **how)
        assert len(session.messages) > 2
        kept = list(session.messages)
        with pytest.raises(ContextLengthError, match=rf"the context holds {room}"):
            session.send("abc", **how)
        assert session.messages == kept
        session.reset()
        send(session, cold, "abc", **how)


# ---- bookkeeping ----------------------------------------------------------------------------------------------------


def test_session_keeps_its_messages(engine):
    session = engine.session(system=SYSTEM)
    reply = session.send("Hello!", **greedy())
    assert session.messages == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hello!"},
        message_of(reply),
    ]
    session.send({"role": "user", "content": "Bye!"}, **greedy())
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    session.reset()
    assert session.messages == [{"role": "system", "content": SYSTEM}]


def test_streamed_turn_equals_a_sent_one(engine, device):
    a, b = engine.session(), engine.session()
    how = {"temperature": 0.8, "seed": 3, "max_tokens": device.pick(30, 5)}
    sent = a.send("Tell me about the sun.", **how)
    chunks = list(b.stream("Tell me about the sun.", **how))
    assert "".join(c.text for c in chunks) == sent.text
    assert a.messages == b.messages


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"nonsense": 1}, {"stop": [""]}], ids=str)
def test_refused_request_leaves_the_conversation(engine, bad):
    session = engine.session()
    session.send("Hello!", **greedy())
    before = list(session.messages)
    with pytest.raises(InvalidRequestError):
        session.send("Again.", **bad)
    with pytest.raises(InvalidRequestError):
        session.send({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    assert session.messages == before


def test_failed_reply_leaves_the_conversation(engine, monkeypatch):
    """Even when part of it had been shown."""
    session = engine.session()
    monkeypatch.setattr(Reply, "next", failing_at(2))
    with pytest.raises(DeviceError, match="injected"):
        session.send("Hello!", **greedy())
    assert session.messages == []
    monkeypatch.undo()
    assert session.send("Hello!", **greedy()).completion_tokens > 0


def test_template_options(engine):
    messages = [{"role": "user", "content": "Hi"}]
    on, off = (engine.render_chat(messages, template_kwargs={"enable_thinking": t}) for t in (True, False))
    assert engine.tokenizer.decode(off[len(on) - 1 :]) == "\n\n</think>\n\n"
    continued = engine.render_chat(messages, template_kwargs=NO_THINKING, continuation="Sure")
    assert engine.tokenizer.decode(continued).endswith("</think>\n\nSure")
    for name in ("tools", "messages", "add_generation_prompt"):
        with pytest.raises(InvalidRequestError, match=name):
            engine.chat(messages, template_kwargs={name: 1})
    with pytest.raises(InvalidRequestError):
        engine.chat([])


def test_chat_streams_what_it_returns(engine, device):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
    whole = engine.chat(messages, template_kwargs=NO_THINKING, **greedy())
    chunks = list(engine.chat(messages, template_kwargs=NO_THINKING, stream=True, **greedy()))
    assert "".join(c.text for c in chunks) == whole.text
    assert "<|im_end|>" not in whole.text
    if device.emulated:  # random-tiny finds no end
        return
    assert whole.finish_reason == "stop"
    assert whole.token_ids[-1] == engine.tokenizer.id_of("<|im_end|>")


def test_a_turn_follows_what_was_said_when_it_begins(engine):
    """Two streams made before either is read give the turns that two sends give."""
    one, two = engine.session(), engine.session()
    want = [one.send(text, **greedy()).token_ids for text in ("Hello!", "And you?")]
    streams = [two.stream(text, **greedy()) for text in ("Hello!", "And you?")]
    assert [stream.completion().token_ids for stream in streams] == want
    assert two.messages == one.messages


def test_a_turn_made_before_a_reset_does_not_bring_the_old_turns_back(engine):
    session = engine.session()
    session.send("Hello!", **greedy())
    pending = session.stream("And you?", **greedy())
    session.reset()
    fresh = engine.session().send("And you?", **greedy())
    assert pending.completion().token_ids == fresh.token_ids
    assert [message["content"] for message in session.messages] == ["And you?", fresh.text]


def test_a_turn_cannot_begin_in_the_middle_of_another(engine):
    session = engine.session()
    first, second = session.stream("Hello!", **greedy()), session.stream("And you?", **greedy())
    next(first)
    with pytest.raises(InvalidRequestError, match="unfinished"):
        next(second)
    assert first.completion().completion_tokens > 0
    assert session.send("And you?", **greedy()).completion_tokens > 0
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2


def test_a_message_that_is_no_message(engine):
    for message in (None, 5, ["user"]):
        with pytest.raises(InvalidRequestError, match=r"the message is .*; allowed: text, or a mapping"):
            engine.session().send(message)
