# SPDX-License-Identifier: Apache-2.0
"""The kinds of device: what the host knows of each, and that nothing else is offered anywhere.

Not handled: opening them (test_pipelines.py).
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from packaging.requirements import Requirement

from lily.cli import cli
from lily.cli.options import DEVICES
from lily.device import kinds
from lily.device.kinds import KINDS, choose_device, environment_options, kind_of, library_path
from lily.device.tuned import opening_options
from lily.errors import DeviceError, InvalidRequestError
from lily.policy import POLICIES
from lily.run import budget
from lily.run.budget import Budget


def test_each_kind_has_a_policy_and_a_library_that_the_build_makes(repository: Path) -> None:
    assert list(KINDS) == list(POLICIES)
    for name, kind in KINDS.items():
        assert (POLICIES[name].device, POLICIES[name].gpu) == (name, kind.gpu)
        assert f"lily_{name}" in (repository / "setup.py").read_text()
        assert kind.library.endswith(f"/liblily_{name}")


def device_choices() -> dict[str, tuple[str, ...]]:
    """What each command offers as ``--device``."""
    return {
        command.name or "": tuple(parameter.type.choices)
        for command in cli.commands.values()
        for parameter in command.params
        if parameter.name == "device" and isinstance(parameter.type, click.Choice)
    }


def test_commands_offer_the_kinds_that_there_are_and_no_other() -> None:
    found = device_choices()
    assert {"chat", "doctor", "generate", "info", "plan", "serve", "tune"} <= set(found)
    assert DEVICES == ("auto", "cpu", "metal")
    assert [name for name, offered in found.items() if set(offered) - {"auto"} != set(KINDS)] == []


def test_documents_offer_the_kinds_that_there_are_and_no_other(repository: Path) -> None:
    files = [repository / "README.md", *(repository / "docs").glob("*.md")]
    offered = {n for file in files for m in re.findall(r"--device ([\w|]+)", file.read_text()) for n in m.split("|")}
    assert offered - {"auto"} == set(KINDS)


def test_each_extra_brings_what_some_module_imports(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    trees = [ast.parse(path.read_text()) for path in (repository / "lily").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used = {(name or "").split(".")[0] for name in imported}
    for extra in set(extras) - {"dev"}:
        assert {Requirement(text).name.replace("-", "_") for text in extras[extra]} <= used, extra


# ---- what a kind decides
def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    for ask in (kind_of, environment_options):
        with pytest.raises(InvalidRequestError, match="unknown device 'tpu'; known: cpu, metal"):
            ask("tpu")
    with pytest.raises(DeviceError, match="there is no 'tpu' device in this build; available: cpu"):
        library_path("tpu")


def test_auto_is_the_gpu_of_the_build_or_else_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "LIBRARIES", {"cpu": Path("c"), "metal": Path("m")})
    assert [choose_device(name) for name in ("auto", "cpu", "metal")] == ["metal", "cpu", "metal"]
    monkeypatch.setattr(kinds, "LIBRARIES", {"cpu": Path("c")})
    assert [choose_device(name) for name in ("auto", "metal")] == ["cpu", "metal"]


def test_a_build_has_the_libraries_of_its_system_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("kinds_of_another_system", kinds.__file__)
    assert spec is not None
    assert spec.loader is not None
    for system, expected in (("darwin", ["cpu/liblily_cpu.dylib", "metal/liblily_metal.dylib"]),
                             ("linux", ["cpu/liblily_cpu.so"])):  # fmt: skip
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setattr("sys.platform", system)
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, spec.name, module)  # where its dataclasses look for it
            spec.loader.exec_module(module)
        package = Path(kinds.__file__).parents[1]
        assert [str(path.relative_to(package)) for path in module.LIBRARIES.values()] == expected


def test_threads_reach_the_device_that_takes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert opening_options("cpu", "model", 3) == {"threads": 3}
    assert opening_options("metal", "model", 3) == {}


def test_a_variable_sets_options_of_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_METAL", "msl=3.2 cache='a b'")
    assert environment_options("metal") == {"msl": "3.2", "cache": "a b"}
    assert environment_options("cpu") == {}


def test_a_budget_is_what_the_device_says_or_what_the_machine_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_bytes", lambda: 50)
    info = {"memory": 1000, "max_buffer": 300}
    cpu, metal = (Budget.of(SimpleNamespace(name=name, info=info)) for name in KINDS)  # type: ignore[arg-type]
    assert (cpu.total, cpu.buffer) == (50, 1 << 62)
    assert (metal.total, metal.buffer) == (1000, 300)
    assert "close other programs" in cpu.remedy
    assert "iogpu.wired_limit_mb" in metal.remedy


def test_no_module_compares_the_name_of_a_device(repository: Path) -> None:
    """What depends on the device is a field of its kind or of its policy."""
    names, found = {*KINDS, "cuda"}, []
    for path in (repository / "lily").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if any(isinstance(side, ast.Constant) and side.value in names for side in sides):
                    found.append(f"{path.relative_to(repository).as_posix()}: {ast.unparse(node)}")
    assert [line for line in found if not line.startswith("lily/msl/")] == []  # its targets are languages
