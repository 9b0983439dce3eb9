# SPDX-License-Identifier: Apache-2.0
"""``lily tune``: how it measures, when the default loses, and what an engine then opens with.

Most tests use engines that only tell how long a token took; one runs a model on the stand-in for Metal.
Not handled: real times, which need a Mac.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import TINY, environment
from metal.standin import Standin
from msl_harness import needs_clang

from lily import tune
from lily.checkpoint.resolve import resolve_model
from lily.cli import run
from lily.device import tuned
from lily.device.kinds import KINDS
from lily.device.tuned import tuned_options
from lily.engine import Engine
from lily.errors import DeviceError, InvalidRequestError, LilyError
from lily.tune import Result, measure

(REPLAY,) = KINDS["metal"].tunable


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that holds nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LILY_METAL", raising=False)
    monkeypatch.setattr(tuned, "machine", lambda: "chip | build | 1")
    return tmp_path


class Fake:
    """Engines whose tokens take the milliseconds that are listed for each value of the option, round by round."""

    def __init__(self, **milliseconds: list[float]) -> None:
        self.left = {value: list(times) for value, times in milliseconds.items()}
        self.opened: list[str] = []
        self.open = 0
        self.replies: dict[str, list[int]] = {}

    def __call__(self) -> Any:
        value = os.environ["LILY_METAL"].rsplit("=", 1)[1]
        self.opened.append(value)
        self.open += 1
        assert self.open == 1, "two engines at once: weights may not fit twice"
        return self

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def generate(self, prompt: str, *, max_tokens: int, temperature: float, ignore_eos: bool) -> Any:
        assert temperature == 0
        assert ignore_eos
        if max_tokens == tune.WARM_UP:
            return None
        ms = self.left[self.opened[-1]].pop(0)
        timings = SimpleNamespace(generation_tokens_per_second=1e3 / ms)
        return SimpleNamespace(timings=timings, token_ids=self.replies.get(self.opened[-1], [1, 2, 3]))


def test_what_gives_another_reply_loses_whatever_its_speed() -> None:
    fake = Fake(encode=[10.0, 11.0], icb=[1.0, 1.0])
    fake.replies["icb"] = [1, 2, 4]
    found = measure("metal", REPLAY, fake, rounds=2)
    assert found.winner == "encode"
    assert "replies differ" in str(found.problem)


def result(encode: list[float], icb: list[float]) -> Result:
    return Result(REPLAY, {"encode": encode, "icb": icb})


def test_both_are_measured_in_turn_and_each_is_first_as_often() -> None:
    fake = Fake(encode=[10.0, 11.0, 12.0], icb=[8.0, 9.0, 7.0])
    found = measure("metal", REPLAY, fake, rounds=3)
    assert fake.opened == ["encode", "icb", "icb", "encode", "encode", "icb"]
    assert found.milliseconds == {"encode": [10.0, 11.0, 12.0], "icb": [8.0, 9.0, 7.0]}
    assert found.winner == "icb"
    assert found.gain == pytest.approx(1 - 8 / 11)
    assert "LILY_METAL" not in os.environ


DECISIONS = {
    "faster in every round": ([10.0, 10.2], [9.0, 9.1], "icb"),
    "slower": ([9.0, 9.1], [10.0, 10.2], "encode"),
    "rounds overlap": ([10.0, 12.0], [8.0, 10.5], "encode"),
    "less than the margin": ([10.0, 10.0], [9.9, 9.85], "encode"),
    "the same": ([10.0, 10.0], [10.0, 10.0], "encode"),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_the_default_loses_only_beyond_the_noise(case: str) -> None:
    encode, icb, winner = DECISIONS[case]
    assert result(encode, icb).winner == winner


def test_what_does_not_run_is_told_and_not_chosen() -> None:
    class Broken(Fake):
        def __call__(self) -> Any:
            if os.environ["LILY_METAL"].endswith("icb"):
                raise DeviceError("no pipeline")
            return super().__call__()

    found = measure("metal", REPLAY, Broken(encode=[10.0, 10.0]), rounds=2)
    assert (found.problem, found.winner) == ("no pipeline", "encode")
    with pytest.raises(DeviceError, match="no pipeline"), environment("LILY_METAL", "msl=3.2"):
        measure("metal", REPLAY, Failing())


class Failing:
    def __call__(self) -> Any:
        raise DeviceError("no pipeline")


def test_one_round_and_an_option_that_the_user_set_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1 rounds tell nothing about noise"):
        measure("metal", REPLAY, Failing(), rounds=1)
    with environment("LILY_METAL", "replay=icb"), pytest.raises(InvalidRequestError, match="LILY_METAL sets replay"):
        measure("metal", REPLAY, Failing())


# ---- what is kept
def remember(model: str, found: Result) -> Path:
    return tuned.remember(model, found.option, found.winner, found.milliseconds)


WON, LOST = result([10.0, 10.0], [8.0, 8.0]), result([8.0, 8.0], [10.0, 10.0])


def test_a_choice_is_used_for_its_model_device_and_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned_options("metal", "a/b") == {}
    path = remember("a/b", WON)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert tuned_options("metal", "a/b") == {"replay": "icb"}
    assert tuned_options("metal", "a/c") == {}
    assert tuned_options("cpu", "a/b") == {}
    monkeypatch.setattr(tuned, "machine", lambda: "chip | newer build | 1")
    assert tuned_options("metal", "a/b") == {}


def test_an_explicit_option_wins() -> None:
    remember("a/b", WON)
    with environment("LILY_METAL", "replay=encode"):
        assert tuned_options("metal", "a/b") == {}
    with environment("LILY_METAL", "msl=3.2"):
        assert tuned_options("metal", "a/b") == {"replay": "icb"}


def test_a_later_measure_replaces_an_earlier_one_and_leaves_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("a/b", "a/c"):
        remember(model, WON)
    path = remember("a/b", LOST)
    assert (tuned_options("metal", "a/b"), tuned_options("metal", "a/c")) == ({}, {"replay": "icb"})
    monkeypatch.setattr(tuned, "machine", lambda: "chip | newer build | 1")
    remember("a/d", WON)
    assert list(json.loads(path.read_text())) == ["chip | newer build | 1"], "old builds are forgotten"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[1]"),
    "another shape": lambda path: path.write_text('{"chip | build | 1": {"a/b": {"options": [1]}}}'),
    "an unknown value": lambda path: path.write_text('{"chip | build | 1": {"a/b": {"options": {"replay": "x"}}}}'),
    "a folder that others can write": lambda path: path.parent.chmod(0o755),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_or_open_file_chooses_nothing(case: str) -> None:
    path = remember("a/b", WON)
    DAMAGE[case](path)
    assert tuned_options("metal", "a/b") == {}


def test_a_damaged_file_is_replaced_and_an_open_folder_refused() -> None:
    path = remember("a/b", WON)
    path.write_text("[1]")
    remember("a/b", WON)
    assert tuned_options("metal", "a/b") == {"replay": "icb"}
    path.parent.chmod(0o755)
    with pytest.raises(LilyError, match="open to other users"):
        remember("a/b", WON)


# ---- the command
def test_on_the_cpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["options"] == []
    assert "nothing to tune on the cpu device" in err


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    def use(fake: Fake) -> None:
        monkeypatch.setattr("lily.cli.options.EngineFlags.open", lambda flags, console: fake())

    return use


def test_the_command_tells_times_and_choice(
    fake_command: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(Fake(encode=[10.0, 10.4], icb=[9.0, 9.2]))
    assert run(["tune", "--device", "metal", "--rounds", "2"]) == 0
    assert capsys.readouterr().out == (
        "replay=encode: 10.200 ms a token (10.000 to 10.400)\n"
        "replay=icb: 9.100 ms a token (9.000 to 9.200)\n"
        "replay=icb is 10.8 % faster and used from now on\n"
    )
    fake_command(Fake(encode=[9.0, 9.0], icb=[9.0, 9.0]))
    assert run(["tune", "--device", "metal", "--rounds", "2", "--json"]) == 0
    (option,) = json.loads(capsys.readouterr().out)["options"]
    assert option["winner"] == "encode"


# ---- on the shim
@needs_clang
def test_an_engine_opens_with_what_was_chosen_for_its_model(emulated: Standin) -> None:
    found = measure("metal", REPLAY, lambda: Engine(TINY, device="metal", max_context=256), rounds=2, tokens=3)
    assert found.problem is None
    assert all(len(times) == 2 and min(times) > 0 for times in found.milliseconds.values())
    for choice, expected in ((WON, "icb"), (LOST, "encode")):
        remember(resolve_model(str(TINY)).key, choice)
        with Engine(TINY, device="metal", max_context=256) as engine:
            assert engine.info["device"]["replay"] == expected


@needs_clang
def test_replaying_that_the_gpu_refuses_leaves_the_default(emulated: Standin) -> None:
    emulated.set(fail_indirect=1)
    found = measure("metal", REPLAY, lambda: Engine(TINY, device="metal", max_context=256), rounds=2, tokens=2)
    assert found.winner == "encode"
    assert found.problem is not None
    assert "Compute function cannot be used with indirect command buffers" in found.problem
