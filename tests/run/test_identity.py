# SPDX-License-Identifier: Apache-2.0
"""What the bits of a state depend on: whatever of it changes, the identity does. No device is open."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lily.policy import POLICIES
from lily.run import identity as module
from lily.run.identity import identity, key_of

CPU, POLICY = POLICIES["cpu"], replace(POLICIES["cpu"], ablate=frozenset({"handoff", "resident-routing"}))


def made(policy: Any = POLICY, model: str = "m", name: str = "cpu", **info: Any) -> dict[str, str]:
    device: Any = SimpleNamespace(name=name, info={"isa": "avx2", "threads": 2, "memory": 10, **info})
    return identity(device, policy, model)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (made(model="n"), "model"),
        (made(name="metal"), "device"),
        (made(isa="portable"), "device"),
        (made(matrix="tensor"), "device"),
        (made(policy=CPU), "policy"),
        (made(policy=replace(POLICY, kv_step=2048)), "policy"),
    ],
)
def test_what_decides_bits_is_part_of_it(changed: dict[str, str], what: str) -> None:
    assert {name for name, value in made().items() if changed[name] != value} == {what}
    assert key_of(changed) != key_of(made())


def test_what_decides_none_is_not() -> None:
    assert made(threads=7, memory=99) == made()


def test_it_is_the_same_in_every_process() -> None:
    """Sets of names have another order in each."""
    assert '"ablate": ["handoff", "resident-routing"]' in made()["policy"]


def test_chip_system_and_code_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made()
    monkeypatch.setattr(module, "machine", lambda: "another chip | build | 1")
    monkeypatch.setattr(module, "_build", lambda: "other code")
    assert {name for name, value in made().items() if before[name] != value} == {
        "machine or version of Lily",
        "build of Lily",
    }
