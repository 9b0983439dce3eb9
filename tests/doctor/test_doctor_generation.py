# SPDX-License-Identifier: Apache-2.0
"""What ``lily doctor`` says of the embedded model: figures from a clock, its part of the report, and how it fails.

Devices: the cpu device, and an engine that moves a clock of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from remedies import instead

from lily.doctor import ceilings, examine, examiner, generation, render
from lily.errors import DeviceError


class Clock:
    """Seconds that pass when something says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rested = False

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rested = True


class Engine:
    """Loads for 3 s. First tokens take 0.5 s, then 0.1 s each, two at a time; after a rest 2 s and 0.2 s."""

    tokens = 5
    clock: Clock

    def __init__(self, model: object, **options: object) -> None:
        assert model is None
        self.clock.now += 3
        self.prompts: list[list[int]] = []
        self.model = SimpleNamespace(name="lily-tiny")
        self.tokenizer = SimpleNamespace(encode=lambda text: [1, 2, 3])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert len(self.prompts) == 6
        assert len({tuple(p[:13]) for p in self.prompts}) == 6  # nothing of one is taken over by the next

    @contextmanager
    def stream(self, prompt: list[int], **sampling: Any) -> Iterator[Iterator[Any]]:
        self.prompts.append(prompt)
        yield self._chunks()

    def _chunks(self) -> Iterator[Any]:
        rested, self.clock.rested = self.clock.rested, False
        # Before anything is compiled or cached it is slow: that reply must not count.
        first, each = (9.0, 1.0) if len(self.prompts) == 1 else (2.0, 0.2) if rested else (0.5, 0.1)
        self.clock.now += first
        yield SimpleNamespace(token_ids=[0])
        for _ in range((self.tokens - 1) // 2):
            self.clock.now += 2 * each
            yield SimpleNamespace(token_ids=[0, 0])
        self.clock.now += 7
        yield SimpleNamespace(token_ids=[])  # text that was held back


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(generation, "time", clock)
    monkeypatch.setattr(generation, "Engine", type("Timed", (Engine,), {"clock": clock}))
    return clock


def test_figures_are_seconds_of_the_clock(clock: Clock) -> None:
    found = generation.generation("cpu", rest=30)
    assert found.pop("model") == "lily-tiny"
    assert found == pytest.approx({
        "prompt_tokens": 16, "reply_tokens": 64, "load_s": 3, "token_s": 0.1, "tokens_per_s": 10, "first_token_s": 0.5,
        "rest_s": 30, "first_token_after_rest_s": 2, "token_after_rest_s": 0.2,
    })  # fmt: skip


def test_a_model_that_stops_at_once_is_an_error(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "tokens", 1)
    monkeypatch.setattr(Engine, "__exit__", lambda *_: None)
    with pytest.raises(DeviceError, match="wrote 1 tokens instead of a story"):
        generation.generation("cpu")


def test_the_embedded_model_writes_a_story() -> None:
    found = generation.generation("cpu", rest=0.01)
    assert found["model"] == "lily-tiny"
    assert min(found[name] for name in found if name.endswith("_s")) > 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An examination without kernels, and ceilings from next to no memory and time."""
    monkeypatch.setattr(ceilings, "ARENA", 4 << 20)
    monkeypatch.setattr(ceilings, "BUDGET", 0.0)


def test_the_report_shows_the_embedded_model(short: None, clock: Clock) -> None:
    document = examine("cpu", sizes=())
    assert document["ok"]
    assert document["generation"]["tokens_per_s"] == pytest.approx(10)
    text = render(document)
    assert "Embedded model (lily-tiny)" in text
    assert "10.0 tokens/s, 100.00 ms a token; loaded in 3.00 s" in text
    assert "first token 500.00 ms after the request; after 2 s of rest 2.00 s, then 200.00 ms a token" in text


@pytest.mark.parametrize("path", ["", "portable"])
def test_an_embedded_model_that_fails_is_reported(path: str, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str, threads: int | None) -> Any:
        assert (device, threads) == ("cpu", 2)
        raise DeviceError("it stopped")

    if path:
        monkeypatch.setenv("LILY_CPU", path)
    monkeypatch.setattr(examiner, "generation", fail)
    document = examine("cpu", sizes=(), threads=2)
    assert document["generation"] == {"error": "it stopped"}
    assert document["problems"] == [{"what": "embedded model", "text": "it stopped", "remedy": instead()}]
    assert "Embedded model\n  failed: it stopped" in render(document)
