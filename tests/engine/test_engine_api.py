# SPDX-License-Identifier: Apache-2.0
"""What a caller of Engine sees: replies, streams, threads, stop strings and stop ids.

Sampling is in test_engine_sampling.py, limits and errors in test_engine_limits.py, reuse in test_engine_exact.py,
conversations in test_engine_sessions.py.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from engine_device import Target, sweep
from engine_harness import failing_at, open_engine, policy, sequence_of
from models import tiny_model
from waiting import PATIENCE, until

from lily.engine import Engine
from lily.errors import DeviceError
from lily.run.reply import Reply
from lily.run.requests import AHEAD
from lily.sampling import SamplingParams
from lily.streaming import StreamChunk

PROMPT = "Once upon a time"
IDS = [7, 300, 41, 5, 900, 41]  # a prompt for random-tiny


@pytest.fixture(scope="module")
def story(device: Target) -> Iterator[Engine]:
    """The embedded model: replies are real text."""
    with open_engine(None, max_context=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(device: Target) -> Iterator[Engine]:
    """A small model with random weights: every logit counts."""
    with open_engine(tiny_model(), max_context=2048) as engine:
        yield engine


# ---- replies and streams --------------------------------------------------------------------------------------------


def test_completion_accounts_for_every_token(story, device):
    tokens = device.pick(30, 3)
    reply = story.generate(PROMPT, max_tokens=tokens, temperature=0)
    assert reply.prompt_tokens == len(story.tokenizer.encode(PROMPT))
    assert reply.completion_tokens == len(reply.token_ids) == tokens
    assert reply.finish_reason == "length"
    assert reply.text == story.tokenizer.decode(reply.token_ids)
    assert reply.logprobs is None
    t = reply.timings
    assert min(t.prompt_seconds, t.generation_seconds, t.prompt_tokens_per_second, t.generation_tokens_per_second) > 0


def test_prompt_may_be_text_or_ids(tiny):
    replies = [
        tiny.generate(prompt, max_tokens=5, temperature=0)
        for prompt in (PROMPT, tiny.tokenizer.encode(PROMPT), np.array(tiny.tokenizer.encode(PROMPT)))
    ]
    assert len({tuple(r.token_ids) for r in replies}) == 1


def test_stream_joined_is_the_completion(story, device):
    how = {"max_tokens": device.pick(40, 4), "temperature": 0.9, "seed": 3, "logprobs": 2}
    chunks = list(story.stream(PROMPT, **how))
    whole = story.generate(PROMPT, **how)
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [p for c in chunks for p in c.logprobs or []] == whole.logprobs
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(c.completion is None for c in chunks[:-1])
    last = chunks[-1]
    assert last.completion is not None
    assert last.finish_reason == last.completion.finish_reason == whole.finish_reason
    assert last.completion.text == whole.text


def test_text_comes_as_it_is_written(story, device):
    """Each chunk is there before the next step's token is asked for, and text is not saved up for the end."""
    stream = story.stream(PROMPT, max_tokens=40, temperature=0)
    early = [next(stream).text for _ in range(device.pick(10, 6))]
    stream.close()
    assert len("".join(early)) > device.pick(15, 9)


def test_closing_a_stream_stops_the_device(tiny):
    stream = tiny.stream(IDS, max_tokens=1000, seed=1, ignore_eos=True)
    for _ in range(3):
        next(stream)
    stream.close()
    s = sequence_of(tiny)
    assert len(s.tokens) <= len(IDS) + 3 + AHEAD + 2  # what was read, what was ready, and two steps under way
    before = s.buffers["outputs"].bytes.copy()
    device = tiny._device
    device.wait(device.submit([]))  # whatever was still under way has run now
    assert (s.buffers["outputs"].bytes == before).all()


def test_abandoned_stream_frees_the_engine(tiny):
    want = tiny.generate(IDS, max_tokens=5, temperature=0).token_ids

    def read_two() -> list[StreamChunk]:
        stream = tiny.stream(IDS, max_tokens=50, seed=1)
        return [next(stream), next(stream)]

    read_two()
    gc.collect()
    assert tiny.generate(IDS, max_tokens=5, temperature=0).token_ids == want


def test_a_request_waits_for_no_stream_that_nobody_is_reading(tiny):
    """Even one of the same thread; both get what they would get alone, to their ends."""
    want = tiny.generate(IDS, max_tokens=2 * AHEAD, seed=1, ignore_eos=True)
    other, score = tiny.generate([1], max_tokens=3, temperature=0), tiny.score([1, 2, 3]).logprobs
    for call, wanted in (
        (lambda: tiny.generate([1], max_tokens=3, temperature=0).token_ids, other.token_ids),
        (lambda: next(tiny.stream([1], max_tokens=3, temperature=0)).token_ids, other.token_ids[:1]),
        (lambda: tiny.score([1, 2, 3]).logprobs.tolist(), score.tolist()),
    ):
        first = tiny.stream(IDS, max_tokens=2 * AHEAD, seed=1, ignore_eos=True)
        got = [next(first)]
        assert call() == wanted
        got += list(first)
        assert [chunk.token_ids[0] for chunk in got] == want.token_ids
        assert got[-1].completion.text == want.text


def test_a_stream_whose_thread_has_gone_holds_up_nobody(tiny):
    want = tiny.generate(IDS, max_tokens=5, temperature=0).token_ids
    stream = tiny.stream(IDS, max_tokens=2 * AHEAD, seed=1, ignore_eos=True)
    reader = threading.Thread(target=next, args=[stream])
    reader.start()
    reader.join()
    assert tiny.generate(IDS, max_tokens=5, temperature=0).token_ids == want
    assert len(list(stream)) == 2 * AHEAD - 1


def test_a_request_waits_for_a_stream_that_other_threads_read_in_turn(tiny):
    """As a pool of threads does it: one reads a piece, another goes on, and the first comes with a request."""
    want = tiny.generate(IDS, max_tokens=9, seed=1, ignore_eos=True).token_ids
    stream = tiny.stream(IDS, max_tokens=9, seed=1, ignore_eos=True)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        got = one.submit(next, stream).result().token_ids + two.submit(next, stream).result().token_ids
        reply = one.submit(tiny.generate, [1], max_tokens=2, ignore_eos=True)
        got += [token for chunk in two.submit(list, stream).result() for token in chunk.token_ids]
        assert reply.result().completion_tokens == 2
    assert got == want


def paused(tiny, **how):
    """A stream of which one chunk was read, and that the engine has left alone since then."""
    stream = tiny.stream(IDS, seed=1, ignore_eos=True, **how)
    first = next(stream)
    until(lambda: stream._request.paused, "the engine pauses a stream that nobody reads")
    return first, stream


def test_a_reader_that_does_not_come_back_keeps_nobody_from_the_device(tiny):
    """What was made ahead is bounded, and the rest comes when it is read."""
    want = tiny.generate(IDS, max_tokens=100, seed=1, ignore_eos=True).token_ids
    first, stream = paused(tiny, max_tokens=100)
    assert len(sequence_of(tiny).tokens) <= len(IDS) + 1 + AHEAD + 2
    assert first.token_ids + [chunk.token_ids[0] for chunk in stream] == want


def test_a_failure_of_a_stream_that_nobody_reads_is_that_streams(tiny, monkeypatch):
    want = tiny.generate([1], max_tokens=3, temperature=0).token_ids
    whole = tiny.generate(IDS, max_tokens=100, seed=1, ignore_eos=True).token_ids
    first, stream = paused(tiny, max_tokens=100)
    got = list(first.token_ids)
    monkeypatch.setattr(Reply, "next", failing_at(2))
    assert tiny.generate([1], max_tokens=3, temperature=0).token_ids == want
    with pytest.raises(DeviceError, match="injected"):
        got.extend(chunk.token_ids[0] for chunk in stream)
    assert got == whole[: len(got)]
    assert 1 < len(got) < 100


def test_ctrl_c_in_a_call_ends_that_request_alone(tiny, monkeypatch):
    want = tiny.generate(IDS, max_tokens=100, seed=1, ignore_eos=True).token_ids
    first, stream = paused(tiny, max_tokens=100)
    following, calls = Reply.next, []

    def interrupted(self: Reply) -> Any:
        if self.limit == 1000:
            calls.append(self)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)
        return following(self)

    monkeypatch.setattr(Reply, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([1], max_tokens=1000, ignore_eos=True)
    assert len(calls) < 1000
    assert first.token_ids + [chunk.token_ids[0] for chunk in stream] == want


def test_a_request_that_is_cancelled_while_it_waits_does_nothing(tiny, monkeypatch):
    following, started, go_on = Reply.next, threading.Event(), threading.Event()

    def held_up(self: Reply) -> Any:
        started.set()
        go_on.wait(PATIENCE)
        return following(self)

    want = tiny.generate(IDS, max_tokens=5, seed=1, ignore_eos=True).token_ids
    monkeypatch.setattr(Reply, "next", held_up)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(tiny.generate, IDS, max_tokens=5, seed=1, ignore_eos=True)
        started.wait(PATIENCE)
        waiting = tiny.stream([1, 2, 3], max_tokens=3)
        got = pool.submit(list, waiting)
        until(lambda: waiting.reading, "the second request waits")
        waiting.cancel()
        go_on.set()
        assert got.result() == []
        assert running.result().token_ids == want
    assert sequence_of(tiny).tokens[: len(IDS)] == IDS


def test_two_threads_may_read_one_stream(tiny):
    want = tiny.generate(IDS, max_tokens=20, seed=1, ignore_eos=True).token_ids
    stream = tiny.stream(IDS, max_tokens=20, seed=1, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool:
        parts = [future.result() for future in [pool.submit(list, stream) for _ in range(2)]]
    assert sorted(chunk.token_ids[0] for part in parts for chunk in part) == sorted(want)


def test_an_engine_cannot_be_copied(tiny):
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copying(tiny)
    assert tiny.generate([1], max_tokens=1).completion_tokens == 1


def test_cancelling_from_another_thread(tiny):
    """The reader gets no more chunks and no completion; the next request is right."""
    want = tiny.generate(IDS, max_tokens=5, temperature=0).token_ids
    stream = tiny.stream(IDS, max_tokens=1500, seed=1, ignore_eos=True)
    got = [next(stream)]
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    for chunk in stream:
        got.append(chunk)
        if len(got) == 1000:
            canceller.join()  # in case it had no turn so far
    canceller.join()
    assert 1 <= len(got) < 1500
    assert all(chunk.completion is None for chunk in got)
    assert tiny.generate(IDS, max_tokens=5, temperature=0).token_ids == want


def test_stream_that_changes_its_thread(tiny):
    want = tiny.generate(IDS, max_tokens=9, seed=1, ignore_eos=True).token_ids
    stream = tiny.stream(IDS, max_tokens=9, seed=1, ignore_eos=True)
    got = [next(stream).token_ids[0]]
    reader = threading.Thread(target=lambda: got.extend(t for _ in range(4) for t in next(stream).token_ids))
    reader.start()
    reader.join()
    got += [chunk.token_ids[0] for chunk in stream]
    assert got == want


def test_error_raised_by_the_reader_frees_the_engine(tiny):
    def read() -> None:
        for _ in tiny.stream(IDS, max_tokens=50, seed=1):
            raise KeyError("reader")

    with pytest.raises(KeyError, match="reader"):
        read()
    assert tiny.generate([1], max_tokens=1).completion_tokens == 1


def test_other_threads_queue(tiny, device):
    """Requests of many threads, while one reads slowly, all get their own answer."""
    prompts = [[i + 1, 2 * i + 5, 77] for i in range(device.pick(8, 3))]
    how = {"max_tokens": device.pick(12, 3), "seed": 5, "ignore_eos": True}
    want = [tiny.generate(p, **how).token_ids for p in prompts]
    got: dict[int, list[int]] = {}

    def work(index: int) -> None:
        got[index] = tiny.generate(prompts[index], **how).token_ids

    slow = tiny.stream(IDS, max_tokens=device.pick(30, 8), seed=1, ignore_eos=True)
    next(slow)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    assert len(list(slow)) == device.pick(29, 7)
    for thread in threads:
        thread.join(PATIENCE)
    assert [got[i] for i in range(len(prompts))] == want


# ---- stops ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(device: Target) -> int:
    """Tokens of the reply that stop strings are looked for in."""
    return device.pick(80, 10)


@pytest.fixture(scope="module")
def unstopped(story: Engine, written: int) -> str:
    return story.generate(PROMPT, max_tokens=written, temperature=0).text


def _cut_at(text: str, stops: Sequence[str]) -> str:
    found = [text.find(s) for s in stops if s in text]
    return text[: min(found)] if found else text


@pytest.mark.parametrize("length", sweep([1, 2, 3, 5, 9, 14], 5))
def test_stop_strings_anywhere_in_the_text(story, unstopped, written, device, length):
    """Also over the borders of tokens: what comes out is the unstopped text cut at the first place it stands."""
    borders = 0
    for start in range(0, len(unstopped) - length, device.pick(11, 17)):
        stop = unstopped[start : start + length]
        chunks = list(story.stream(PROMPT, max_tokens=written, temperature=0, stop=stop))
        reply = chunks[-1].completion
        assert reply is not None
        assert reply.text == _cut_at(unstopped, [stop]) == "".join(c.text for c in chunks)
        assert reply.finish_reason == "stop"
        assert stop in story.tokenizer.decode(reply.token_ids)
        assert stop not in story.tokenizer.decode(reply.token_ids[:-1])  # it ended as soon as it could
        borders += all(stop not in story.tokenizer.decode([t]) for t in reply.token_ids)
    assert borders or length < device.pick(3, 6)


def test_several_stop_strings(story, unstopped, written):
    n = len(unstopped) // 2
    stops = [unstopped[n:], "never in the text", unstopped[n - 10 : n - 1], unstopped[n - 7 : n - 5]]
    reply = story.generate(PROMPT, max_tokens=written, temperature=0, stop=stops)
    assert reply.text == _cut_at(unstopped, stops)


def test_text_held_back_for_a_stop_string_comes_in_the_end(story, device):
    """The reply ends by length while its last characters might have begun a stop string."""
    for tokens in device.pick((10, 11, 12), (5,)):
        plain = story.generate(PROMPT, max_tokens=tokens, temperature=0).text
        held = story.generate(PROMPT, max_tokens=tokens, temperature=0, stop=plain[-2:] + "\0 not coming")
        assert held.text == plain
        assert held.finish_reason == "length"


def test_stop_ids_end_the_reply_and_are_counted(tiny):
    whole = tiny.generate(IDS, max_tokens=9, seed=2, ignore_eos=True).token_ids
    stop = whole[6]
    first = whole.index(stop)
    reply = tiny.generate(IDS, max_tokens=30, seed=2, ignore_eos=True, stop_token_ids=[stop])
    assert reply.token_ids == whole[: first + 1]
    assert reply.completion_tokens == first + 1
    assert reply.finish_reason == "stop"
    assert reply.text == tiny.tokenizer.decode([t for t in whole[:first] if t not in tiny.skip_ids()])


def test_a_stop_string_that_is_a_control_token_ends_the_reply_as_an_id(tiny):
    """Its text is never in the reply, so it could not be found there."""
    start = tiny.tokenizer.id_of("<|im_start|>")
    assert start in tiny.tokenizer.special_ids
    how = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logit_bias": {start: 1e4}}
    for stop in ("<|im_start|>", ["<|im_end|>", "<|im_start|>", "never"]):
        reply = tiny.generate(IDS, stop=stop, **how)
        assert (reply.token_ids, reply.text, reply.finish_reason) == ([start], "", "stop")
    assert tiny.generate(IDS, stop="<|im_start", **how).token_ids == [start] * 5  # no token: only text could match


def test_sampling_may_be_given_at_once_by_name_or_both(tiny):
    """Parameters at once leave nothing to the checkpoint; what is named beside them changes them."""
    everything = SamplingParams(max_tokens=6, temperature=2.0, top_k=50, seed=4, ignore_eos=True)
    named = {f.name: getattr(everything, f.name) for f in fields(everything)}
    want = tiny.generate(IDS, **named)
    assert tiny.generate(IDS, everything).token_ids == want.token_ids
    assert [c.token_ids[0] for c in tiny.stream(IDS, everything)] == want.token_ids
    assert tiny.generate(IDS, everything, max_tokens=2).token_ids == want.token_ids[:2]
    chat = [{"role": "user", "content": "Hi"}]
    replies = [tiny.chat(chat, everything).token_ids, tiny.session().send("Hi", everything).token_ids]
    assert replies == [tiny.chat(chat, **named).token_ids] * 2


def test_a_result_tells_the_seed_that_repeats_it(tiny):
    assert tiny.generate(IDS, max_tokens=1, seed=5).seed == 5
    drawn = tiny.generate(IDS, max_tokens=8, temperature=3.0, top_k=0, top_p=1.0, ignore_eos=True)
    again = tiny.generate(IDS, max_tokens=8, temperature=3.0, top_k=0, top_p=1.0, ignore_eos=True, seed=drawn.seed)
    assert again.token_ids == drawn.token_ids


def test_without_a_limit_a_reply_fills_the_context(device):
    with open_engine(tiny_model(), max_context=24) as engine:
        reply = engine.generate(IDS, seed=1, ignore_eos=True)
    assert (reply.completion_tokens, reply.finish_reason) == (24 - len(IDS), "length")


def test_the_reading_of_a_prompt_is_reported_by_chunks(device):
    seen: list[tuple[int, int]] = []
    prompt = list(range(1, 71))
    with policy(chunks=((0, 16),), buckets=(8, 16)), open_engine(tiny_model(), max_context=128) as engine:
        list(engine.stream(prompt, max_tokens=1, on_prompt=lambda done, total: seen.append((done, total))))
        assert [total for _, total in seen] == [70] * len(seen)
        done = [done for done, _ in seen]
        assert done[0] == 0
        assert done[-1] == 70
        assert done == sorted(set(done))
        assert {16, 32, 48, 64} <= set(done)
        again = [*prompt, 5, 6]
        list(engine.stream(again, max_tokens=1, on_prompt=lambda done, total: seen.append((done, total))))
        assert seen[len(done)][0] > 0  # what is reused is done already
        assert seen[-1] == (72, 72)


def test_end_of_sequence_ids_of_the_checkpoint_end_the_reply(tiny):
    eos = tiny.info["stop_token_ids"][0]
    reply = tiny.generate(PROMPT, max_tokens=50, seed=1, logit_bias={eos: 1000})
    assert reply.token_ids == [eos]
    assert (reply.text, reply.finish_reason) == ("", "stop")
    reply = tiny.generate(PROMPT, max_tokens=5, seed=1, logit_bias={eos: 1000}, ignore_eos=True)
    assert reply.token_ids == [eos] * 5
    assert (reply.text, reply.finish_reason) == ("", "length")


def test_last_allowed_token_that_is_a_stop_id_stops(tiny):
    whole = tiny.generate(IDS, max_tokens=8, seed=2, ignore_eos=True).token_ids
    at = max(i for i, t in enumerate(whole) if t not in whole[:i])
    reply = tiny.generate(IDS, max_tokens=at + 1, seed=2, ignore_eos=True, stop_token_ids=[whole[at]])
    assert (reply.finish_reason, reply.completion_tokens) == ("stop", at + 1)


def test_reply_that_ends_inside_a_character(tiny):
    """The first byte of a character, forced again and again: shown as U+FFFD, the last one when the reply ends."""
    for byte, sampling in ((0xC5, {}), (0xE2, {"stop": "\0"}), (0xF0, {"stop_token_ids": [4]})):
        id = tiny.tokenizer.token_bytes.index(bytes([byte]))
        chunks = list(tiny.stream([1], max_tokens=3, temperature=0, logit_bias={id: 1e4}, **sampling))
        assert [c.text for c in chunks] == ["", "\ufffd", "\ufffd" * 2]
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.text == "\ufffd" * 3
