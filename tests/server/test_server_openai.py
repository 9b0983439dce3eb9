# SPDX-License-Identifier: Apache-2.0
"""The server as the official ``openai`` client sees it, held to what the engine gives by itself."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import openai
import pytest
from server_harness import HI, Running

from lily.engine import Engine

STORY = [{"role": "user", "content": "Tell me a story about a cat."}]


def of_engine(engine: Engine, messages: Any = HI, **how: Any) -> Any:
    return engine.chat(messages, **{"seed": 5, "max_tokens": 24, **how})


def ask(server: Running, messages: Any = HI, **how: Any) -> Any:
    return server.openai.chat.completions.create(model="any", messages=messages, **{"seed": 5, "max_tokens": 24, **how})


def joined(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_reply_is_that_of_the_engine(server: Running, engine: Engine) -> None:
    got, want = ask(server), of_engine(engine)
    (choice,) = got.choices
    assert (got.object, got.model, choice.index) == ("chat.completion", "tiny", 0)
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert choice.finish_reason == want.finish_reason
    counts = got.usage
    assert (counts.prompt_tokens, counts.completion_tokens) == (want.prompt_tokens, want.completion_tokens)
    assert counts.total_tokens == want.prompt_tokens + want.completion_tokens


def test_cached_tokens_and_timings_are_told_in_the_names_of_llama_server(server: Running) -> None:
    ask(server, STORY)
    got = ask(server, STORY)
    cached = got.usage.prompt_tokens_details.cached_tokens
    assert cached > 0
    timings = got.model_extra["timings"]
    assert set(timings) == {
        "cache_n", "cache_reason", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms",
        "predicted_per_second",
    }  # fmt: skip
    assert (timings["cache_n"], timings["prompt_n"]) == (cached, got.usage.prompt_tokens - cached)
    assert timings["predicted_n"] == got.usage.completion_tokens


@pytest.mark.parametrize("seed", range(4))
def test_what_is_streamed_is_what_is_not(server: Running, seed: int) -> None:
    whole = ask(server, STORY, seed=seed, temperature=1.0)
    chunks = list(ask(server, STORY, seed=seed, temperature=1.0, stream=True))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_usage_comes_once_at_the_end_of_a_stream_that_asks_for_it(server: Running) -> None:
    *chunks, last = ask(server, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == ask(server).usage.completion_tokens
    assert all(c.choices and c.usage is None for c in chunks)


def test_a_prompt_is_continued_as_it_is(server: Running, engine: Engine) -> None:
    how: dict[str, Any] = {"seed": 3, "max_tokens": 12}
    want = engine.generate("Once upon a time", logprobs=2, **how)
    client = server.openai
    for prompt in ("Once upon a time", engine.tokenizer.encode("Once upon a time"), ["Once upon a time"]):
        got = client.completions.create(model="any", prompt=prompt, logprobs=2, **how)
        assert (got.object, got.choices[0].text) == ("text_completion", want.text)
    assert got.choices[0].finish_reason == want.finish_reason == "length"
    logprobs = got.choices[0].logprobs
    assert logprobs.token_logprobs == [entry.logprob for entry in want.logprobs]
    assert "".join(logprobs.tokens) == want.text
    assert [want.text[at:].startswith(t) for t, at in zip(logprobs.tokens, logprobs.text_offset, strict=True)]
    chunks = list(client.completions.create(
        model="any", prompt="Once upon a time", stream=True, stream_options={"include_usage": True}, **how
    ))  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks[:-1]) == want.text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)


def test_log_probabilities_are_those_of_the_engine(server: Running, engine: Engine) -> None:
    want = of_engine(engine, logprobs=3)
    got = ask(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.logprob for entry in got] == [entry.logprob for entry in want.logprobs]
    assert [bytes(entry.bytes) for entry in got] == [engine.tokenizer.token_bytes[id] for id in want.token_ids]
    assert [[t.logprob for t in entry.top_logprobs] for entry in got] == [[v for _, v in e.top] for e in want.logprobs]
    streamed = [
        entry
        for chunk in ask(server, logprobs=True, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == got


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.9}, {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"stop": "will"}, {"stop": ["friendly", "zzz"]}, {"logit_bias": {"300": 100}}, {"max_tokens": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_asked_of_the_sampler_reaches_it(server: Running, engine: Engine, how: dict[str, Any]) -> None:
    given = {name: {300: 100} if name == "logit_bias" else value for name, value in how.items()}
    want, got = of_engine(engine, **given), ask(server, **how)
    assert got.choices[0].message.content == want.text
    assert got.choices[0].finish_reason == want.finish_reason


def test_fields_that_the_client_does_not_know_reach_the_sampler_too(server: Running, engine: Engine) -> None:
    how: dict[str, Any] = {"top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3, "ignore_eos": True}
    got = ask(server, temperature=1.0, max_tokens=None, extra_body={**how, "max_completion_tokens": 30})
    assert got.choices[0].message.content == of_engine(engine, temperature=1.0, **{**how, "max_tokens": 30}).text
    assert got.usage.completion_tokens == 30


def test_the_priority_reaches_the_engine_s_thread(server: Running, engine: Engine) -> None:
    submit, seen = engine._scheduler.submit, []
    with mock.patch.object(engine._scheduler, "submit", lambda task: (seen.append(task.scheduling), submit(task))):
        ask(server, max_tokens=1, extra_body={"priority": -7})
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": 7})
        ask(server, max_tokens=1)
    assert [scheduling.priority for scheduling in seen] == [-7, 7, 0]


def test_a_seed_repeats_a_reply_and_none_does_not(server: Running) -> None:
    def text(**how: Any) -> str:
        return str(ask(server, STORY, temperature=1.2, reasoning_effort="none", **how).choices[0].message.content)

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=None) for _ in range(4)}) > 1


def test_without_a_limit_a_reply_may_fill_the_context(server: Running, engine: Engine) -> None:
    got = ask(server, max_tokens=None, extra_body={"ignore_eos": True})
    assert got.choices[0].finish_reason == "length"
    assert got.usage.total_tokens == engine.max_context


def test_messages_in_every_form_make_the_prompt_that_the_engine_makes(server: Running, engine: Engine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "up."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Up it is."},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    want = engine.chat_template.render(messages, tools=tools)
    got = server.post("/apply-template", {"messages": messages, "tools": tools}).json()
    assert got == {"prompt": want}
    assert "Be brief.\n\nBe kind." in want
    assert server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"] == (
        engine.render_chat(messages, tools=tools)
    )
    none = server.post("/apply-template", {"messages": messages, "tools": tools, "tool_choice": "none"}).json()
    assert none == {"prompt": engine.chat_template.render(messages)}
    assert ask(server, messages, tools=tools, tool_choice="auto").usage.prompt_tokens == len(
        engine.render_chat(messages, tools=tools)
    )


def test_thinking_is_switched_off_by_effort_or_by_option(server: Running, engine: Engine) -> None:
    off = engine.chat_template.render(HI, enable_thinking=False)
    on = engine.chat_template.render(HI)
    assert off != on

    def prompt(**fields: Any) -> str:
        return str(server.post("/apply-template", {"messages": HI, **fields}).json()["prompt"])

    assert prompt(reasoning_effort="none") == off
    assert prompt(reasoning_effort="high") == prompt(reasoning_effort=None) == on
    assert prompt(chat_template_kwargs={"enable_thinking": False, "unknown": 1}) == off
    assert prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == on


def test_a_last_message_of_the_assistant_is_continued(server: Running, engine: Engine) -> None:
    messages = [*HI, {"role": "assistant", "content": "I will"}]
    start = engine.chat_template.render(HI) + "\n</think>\n\nI will"
    assert server.post("/apply-template", {"messages": messages}).json()["prompt"] == start
    want = engine.generate(engine.tokenizer.encode(start), seed=5, max_tokens=6)
    assert ask(server, messages, max_tokens=6).choices[0].message.content == want.text
    thinking = [*HI, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    assert server.post("/apply-template", {"messages": thinking}).json()["prompt"] == (
        engine.chat_template.render(HI) + "Hm"
    )
    both = [*HI, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}]
    assert server.post("/apply-template", {"messages": both}).json()["prompt"] == (
        engine.chat_template.render(HI) + "Hm\n</think>\n\nYes"
    )


def test_the_model_is_listed_with_its_context_under_any_name(server: Running, engine: Engine) -> None:
    client = server.openai
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "lily")
    assert model.model_extra is not None
    assert model.model_extra["context_length"] == model.model_extra["max_model_len"] == engine.max_context
    assert client.models.retrieve("some/other").id == "tiny"


def test_tokens_of_a_text_and_back(server: Running, engine: Engine) -> None:
    ids = engine.tokenizer.encode("Once upon a time")
    got = server.post("/tokenize", {"content": "Once upon a time"}).json()
    assert got == {"tokens": ids, "count": len(ids), "max_model_len": engine.max_context}
    pieces = server.post("/tokenize", {"content": "Once upon", "with_pieces": True}).json()["tokens"]
    assert "".join(entry["piece"] for entry in pieces) == "Once upon"
    assert server.post("/detokenize", {"tokens": ids}).json() == {"content": "Once upon a time"}


def test_clients_in_parallel_get_what_they_get_one_after_the_other(server: Running) -> None:
    chats = [[{"role": "user", "content": f"Tell me about number {n} and the colour {n * 7}."}] for n in range(8)]

    def reply(n: int) -> str:
        how: dict[str, Any] = {"seed": n, "temperature": 1.0, "reasoning_effort": "none"}
        if n % 2:
            return joined(list(ask(server, chats[n], **how, stream=True)))
        return str(ask(server, chats[n], **how).choices[0].message.content)

    alone = [reply(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reply, range(8))) == alone
    assert len(set(alone)) > 4


def test_an_error_is_the_client_s_exception_with_its_fields(server: Running, engine: Engine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, temperature=200)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, [{"role": "user", "content": "word " * 3000}])
    assert caught.value.code == "context_length_exceeded"
    sent = len(engine.render_chat([{"role": "user", "content": "word " * 3000}]))
    assert {str(engine.max_context), str(sent)} <= set(re.findall(r"\d+", str(caught.value).replace(",", "")))
