# SPDX-License-Identifier: Apache-2.0
"""Conversations that outlive their place on the device, or their engine: they go on with the bits of a cold run.

Not handled: the files and the folder (test_saved.py, test_shelf.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from engine_device import Target, cpu_only
from engine_harness import open_engine, policy
from models import tiny_model

from lily.engine import Completion, Engine
from lily.errors import CacheError, ContextLengthError, InvalidRequestError, LilyError
from lily.run import saved as saved_module
from lily.run import shelf as shelf_module

HOW: dict[str, Any] = {"seed": 7, "ignore_eos": True, "logprobs": 2}
SMALL: dict[str, Any] = {"chunks": ((0, 16),), "buckets": (8, 16), "kv_step": 32, "message_gap": 1}
A, B, C = ([(number * 101 + i * 13) % 900 + 1 for i in range(40)] for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def short_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "LEAST", 1)
    monkeypatch.setattr("lily.run.residents.CHEAP", 1)


def small_engine(**options: Any) -> Engine:
    with policy(**SMALL):
        return open_engine(tiny_model(), max_context=128, **options)


def same(got: Completion, want: Completion) -> bool:
    return (got.token_ids, got.logprobs, got.text) == (want.token_ids, want.logprobs, want.text)


@pytest.fixture(scope="module")
def cold(device: Target) -> Iterator[Any]:
    """What a request gives in an engine that knows nothing."""
    with small_engine() as engine:

        def ask(tokens: list[int], count: int) -> Completion:
            for resident in engine._residents._all:
                resident.sequence.reset()
            return engine.generate(tokens, max_tokens=count, **HOW)

        yield ask


def test_a_saved_conversation_goes_on_in_another_engine(cold, device, tmp_path):
    count, file = device.pick(20, 3), tmp_path / "a"
    with small_engine() as engine:
        first = engine.generate(A, max_tokens=count, **HOW)
        kept = engine.save_cache(file)
    longer = [*A, *first.token_ids, 5, 6, 7]
    with small_engine(sequences=2) as engine:
        engine.generate(B, max_tokens=1, **HOW)
        assert engine.load_cache(file) == kept >= 32
        got = engine.generate(longer, max_tokens=count, **HOW)
        assert got.cached_tokens == kept
        assert same(got, cold(longer, count))
        assert engine.generate([*B, 1], max_tokens=1, **HOW).cached_tokens >= 32, "the other one is still there"


def test_it_is_saved_while_its_reply_is_under_way(cold, device, tmp_path):
    count = device.pick(30, 4)
    with small_engine() as engine:
        stream = engine.stream(A, max_tokens=count, **HOW)
        next(stream)
        kept = engine.save_cache(tmp_path / "a")
        assert same(list(stream)[-1].completion, cold(A, count))
    if kept:  # where only kept states count, and one was kept
        with small_engine() as engine:
            engine.load_cache(tmp_path / "a")
            got = engine.generate([*A, 9], max_tokens=count, **HOW)
            assert (got.cached_tokens, same(got, cold([*A, 9], count))) == (kept, True)


def test_nothing_is_saved_of_nothing(cold, device, tmp_path):
    with small_engine() as engine:
        assert engine.save_cache(tmp_path / "a") == 0
        assert not (tmp_path / "a").exists()
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.save_cache(tmp_path / "a")


@cpu_only("the same on every device")
def test_what_cannot_be_saved_or_loaded_is_told(cold, device, tmp_path):
    with small_engine() as engine:
        engine.generate(A, max_tokens=20, **HOW)
        with pytest.raises(LilyError, match=r"cannot be saved in .*missing/a: No such file or directory"):
            engine.save_cache(tmp_path / "missing" / "a")
        tokens = engine.save_cache(tmp_path / "a")
        with pytest.raises(CacheError, match="no such file"):
            engine.load_cache(tmp_path / "b")
        (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-1])
        with pytest.raises(CacheError, match="is damaged"):
            engine.load_cache(tmp_path / "b")
        assert engine.generate([*A, 1], max_tokens=1, **HOW).cached_tokens >= 32, "nothing was lost"
    for changes, model, context, problem in [
        ({}, tiny_model(), tokens, "the saved conversation has"),
        ({"score_rows": 32}, tiny_model(), 128, "another policy"),
        ({}, None, 128, "another model"),
    ]:
        refused = pytest.raises((CacheError, ContextLengthError), match=problem)
        with policy(**SMALL, **changes), open_engine(model, max_context=context) as engine, refused:
            engine.load_cache(tmp_path / "a")


def test_what_gave_way_is_read_from_disk(cold, device, tmp_path):
    """With one sequence each conversation takes the place of the other."""
    count = device.pick(12, 3)
    with small_engine(cache_dir=tmp_path) as engine:
        first = engine.generate(A, max_tokens=count, **HOW)
        engine.generate(B, max_tokens=count, **HOW)
        longer = [*A, *first.token_ids, 5, 6, 7]
        again = engine.generate(longer, max_tokens=count, **HOW)
        assert again.cached_tokens >= 32
        assert same(again, cold(longer, count))
    with small_engine(cache_dir=tmp_path) as engine:  # tomorrow
        for tokens in ([*longer, *again.token_ids, 8], [*B, 8]):
            got = engine.generate(tokens, max_tokens=count, **HOW)
            assert got.cached_tokens >= 32
            assert same(got, cold(tokens, count))


@cpu_only("the same on every device")
def test_a_request_that_is_cancelled_while_it_is_read_from_disk(cold, device, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_module, "PIECE", 64)
    with small_engine(cache_dir=tmp_path) as engine:
        engine.generate(A, max_tokens=2, **HOW)
        engine.generate(B, max_tokens=2, **HOW)
        restore, begun, stream = saved_module.restore, threading.Event(), None

        def restoring(*given: Any) -> Iterator[None]:
            pieces = restore(*given)
            yield next(pieces)
            begun.set()
            stream.cancel()
            yield from pieces

        with mock.patch.object(shelf_module, "restore", restoring):
            stream = engine.stream([*A, 9], max_tokens=2, **HOW)
            assert list(stream) == []
        assert begun.is_set()
        got = engine.generate([*A, 9], max_tokens=5, **HOW)
        assert got.cached_tokens >= 32
        assert same(got, cold([*A, 9], 5))


@cpu_only("the same on every device")
def test_a_full_disk_fails_no_request(cold, device, tmp_path, caplog):
    with small_engine(cache_dir=tmp_path) as engine:
        engine.generate(A, max_tokens=2, **HOW)
        with mock.patch.object(shelf_module, "save", side_effect=OSError(28, "No space left on device")):
            assert same(engine.generate(B, max_tokens=5, **HOW), cold(B, 5))
        assert "No space left on device" in caplog.text
        assert engine.generate([*A, 9], max_tokens=2, **HOW).cached_tokens == 0


@cpu_only("the same on every device")
def test_how_much_there_may_be_is_checked_before_anything_is_loaded(cold, device, tmp_path):
    for options, message in [
        ({"cache_bytes": 1000}, "cache_bytes is 1000; allowed are"),
        ({"cache_bytes": True}, "cache_bytes is True; allowed: a whole number"),
        ({"cache_disk_bytes": 0}, "cache_disk_bytes is 0; allowed"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            small_engine(**options)
    (tmp_path / "file").touch()
    with mock.patch("lily.device.weights.Weights.load") as load, pytest.raises(LilyError, match="cannot be kept in"):
        small_engine(cache_dir=tmp_path / "file")
    load.assert_not_called()
    with small_engine(cache_bytes=50_000_000) as engine:
        assert engine._residents._budget == 50_000_000


@cpu_only("the same on every device")
def test_what_others_wait_for_goes_on_meanwhile(cold, device):
    """A call in the engine's thread runs between two units of work, and its error is the caller's."""
    with small_engine(sequences=2) as engine:
        stream = engine.stream(A, max_tokens=50, **HOW)
        next(stream)
        assert engine._scheduler.call(lambda: threading.current_thread().name) == "lily engine"
        with pytest.raises(ZeroDivisionError):
            engine._scheduler.call(lambda: 1 // 0)
        assert same(list(stream)[-1].completion, cold(A, 50))
    with pytest.raises(InvalidRequestError, match="closed"):
        engine._scheduler.call(lambda: None)
