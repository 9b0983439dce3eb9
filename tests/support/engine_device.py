# SPDX-License-Identifier: Apache-2.0
"""The devices that the engine's tests run on: a pytest plugin (conftest.py) with the fixture ``device``.

Every test of the engine runs once on each device that LILY_DEVICE names, "cpu,metal" without it. On a Mac metal is the
GPU; elsewhere it is the real shim on the stand-in for Metal, with the shaders run by the emulator (tests/metal/).

    def test_it(device):
        with open_engine(TINY) as engine:                     # on the device of this test
            steps = device.pick(full=100, emulated=8)

Marks: ``only_on(name, reason)`` leaves a test out on all other devices; ``sweep`` makes it part of ``make test-full``
only where kernels are emulated. ``@on_paths(*isa_paths())`` runs a test on every instruction-set path of the cpu
device.

Not handled: opening engines (engine_harness.py); what the stand-in can do (metal/standin.h).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from lily.device.kinds import KINDS

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where a test runs; ``isa`` is a path of the cpu device, None for the best one."""

    name: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.isa or self.name

    @property
    def emulated(self) -> bool:
        """Whether its kernels run on the emulator: a token of random-tiny takes 50 ms there, one of a prompt 20."""
        return self.name == "metal" and sys.platform != "darwin"

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on nothing but the tokens; elsewhere also on the edges of chunks."""
        from lily.policy import policy_for

        return policy_for(self.name).rows_invariant

    @property
    def rounds(self) -> bool:
        """Whether it rounds to bfloat16 what enters a matrix product; float32 paths do not."""
        return self.name != "cpu" or (self.isa or isa_paths()[0]) not in ("portable", "avx2", "avx512", "neon")

    def pick(self, full: T, emulated: T) -> T:
        """One of two sizes of a test."""
        return emulated if self.emulated else full


def chosen() -> list[Target]:
    """The devices that LILY_DEVICE names."""
    names = os.environ.get("LILY_DEVICE", "cpu,metal").split(",")
    unknown = set(names) - set(KINDS)
    assert not unknown, f"LILY_DEVICE names {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}"
    return [Target(name) for name in names]


@cache
def isa_paths() -> list[str]:
    """The cpu device's instruction-set paths that this machine has, best first."""
    from lily.device.device import Device

    with Device("cpu", threads=1) as device:
        return device.info["isas"].split(",")


def paths(*isas: str) -> list[Target]:
    """The chosen devices, the cpu on each of ``isas``."""
    return [path for d in chosen() for path in ([Target("cpu", i) for i in isas] if d.name == "cpu" else [d])]


_current = Target("cpu")


def current() -> Target:
    """The device of the running test; the cpu for a test that does not ask for ``device``."""
    return _current


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _current
    _current = _device_of(item) or Target("cpu")


@pytest.fixture(scope="module", params=chosen(), ids=str)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The device on which ``open_engine`` opens engines."""
    if request.param.emulated:
        with _emulated(tmp_path_factory.mktemp("metal")):
            yield request.param
    else:
        yield request.param


@pytest.fixture
def stand_in(device: Target) -> Iterator[Any]:
    """The stand-in for Metal, to make it fail or change its order; afterwards it behaves again."""
    if not device.emulated:
        pytest.skip("faults and orders are those of the stand-in for Metal, which runs where there is no Metal")
    from metal.standin import standin

    s = standin()
    yield s
    s.set(order=0, seed=1, fail_submission=0, fail_code=1, fail_text="", fail_buffer=0, fail_encoder=0)


@contextmanager
def _emulated(folder: Path) -> Iterator[None]:
    from metal.engine import emulated_metal
    from msl_compiler import MISSING, compiler

    if compiler() is None:
        pytest.skip(MISSING)
    # Kernels are compiled when a plan needs them: all that any request could need keep the host's compiler busy for
    # minutes (test_metal_engine.py does it once).
    with emulated_metal(folder), mock.patch("lily.engine.compile_pipelines"):
        try:
            yield
        finally:
            gc.collect()  # engines that tests dropped: leaving checks that no object of Metal is left


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_on(device, reason): says nothing on other devices")
    config.addinivalue_line("markers", "sweep: `full` where kernels are emulated")


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is ``full``
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = {item for item in items if _says_nothing(item)}
    if elsewhere:
        config.hook.pytest_deselected(items=list(elsewhere))
        items[:] = [item for item in items if item not in elsewhere]
    for item in items:
        at = _device_of(item)
        if at is None:
            continue
        if at.emulated and item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.full)


def _says_nothing(item: pytest.Item) -> bool:
    """Whether a test is meant for another device than its own."""
    at = _device_of(item)
    return at is not None and any(at.name != mark.args[0] for mark in item.iter_markers("only_on"))


def _device_of(item: pytest.Item) -> Target | None:
    """The device that a test asks for."""
    callspec = getattr(item, "callspec", None)
    value = callspec.params.get("device") if callspec else None
    return value if isinstance(value, Target) else None


def on_paths(*isas: str) -> pytest.MarkDecorator:
    """Runs a test on these instruction-set paths of the cpu device, and on the other devices."""
    return pytest.mark.parametrize("device", paths(*isas), ids=str, indirect=True)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Leaves a test out on other devices."""
    return pytest.mark.only_on("cpu", reason=reason)


def sweep(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of a parameter, of which only ``kept`` are tried where kernels are emulated; the full test has all."""
    values = list(values)
    assert all(k in values for k in kept)
    return [v if v in kept else pytest.param(*_tuple(v), marks=pytest.mark.sweep) for v in values]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
