# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh names what a machine lacks in one line, with the command that fixes it.

The script runs on a path that holds nothing but what a test puts there.  Not handled: installing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TOOLS = ("sh", "uname", "mktemp", "rm", "cat")


class Machine:
    """A folder that serves as the whole path."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder = folder
        self.repository = repository
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (folder / name).symlink_to(found)

    def add(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def problem(self, *arguments: str) -> str:
        """The one line with which setup.sh gives up."""
        command = ["/bin/sh", "tools/setup.sh", str(self.folder / "venv"), "requirements/base.txt", *arguments]
        path = {"PATH": str(self.folder), "TMPDIR": str(self.folder)}
        done = subprocess.run(command, cwd=self.repository, env=path, capture_output=True, text=True)
        assert done.returncode == 1
        assert not (self.folder / "venv").exists()
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
def machine(tmp_path: Path, repository: Path) -> Machine:
    return Machine(tmp_path, repository)


@pytest.fixture
def debian(machine: Machine) -> Machine:
    (machine.folder / "uname").unlink()
    machine.add("uname", "echo Linux")
    machine.add("apt-get", "exit 1")
    return machine


@pytest.fixture
def macos(machine: Machine) -> Machine:
    (machine.folder / "uname").unlink()
    machine.add("uname", "echo Darwin")
    machine.add("xcode-select", "exit 0")
    return machine


def python_without(*modules: str) -> str:
    """A Python that works, except that whatever mentions one of ``modules`` fails."""
    fails = "|".join(f"*{module}*" for module in modules)
    return f'case "$*" in {fails}) exit 1;; esac; exec {sys.executable} "$@"'


def with_compiler(machine: Machine) -> Machine:
    machine.add("gcc", "exit 0")
    return machine


def test_all_that_is_missing_is_named_in_one_line_with_one_command(debian: Machine) -> None:
    debian.add("python3", python_without("ensurepip", "Python.h"))
    line = debian.problem()
    for problem in ("the venv module of python3 is missing", "Python.h of python3 is missing", "no C compiler found"):
        assert problem in line
    assert line.endswith(f"; fix: sudo apt-get install python{VERSION}-venv python{VERSION}-dev gcc libc6-dev")


def test_a_bare_machine_needs_one_command(debian: Machine) -> None:
    fix = "; fix: sudo apt-get install python3 python3-venv python3-dev gcc libc6-dev"
    assert debian.problem().endswith(fix)
    assert debian.problem("/nowhere/python3").endswith(fix)


def test_one_remedy_of_a_mac_is_named_once(macos: Machine) -> None:
    macos.add("python3", python_without("ensurepip", "Python.h"))
    macos.add("gcc", "exit 0")
    assert machine_fix(macos) == f"brew install python@{VERSION}"


def test_a_machine_without_python_is_told_which_packages_bring_it(debian: Machine) -> None:
    assert with_compiler(debian).problem().endswith("fix: sudo apt-get install python3 python3-venv python3-dev")


def test_a_python_that_is_too_old_or_a_broken_shim_does_not_count(debian: Machine) -> None:
    debian.add("python3.14", "exit 127")
    debian.add("python3", "exit 1")
    assert "no Python 3.11 or newer" in debian.problem()


def test_a_wrong_choice_of_python_is_named(debian: Machine) -> None:
    assert "PYTHON=/nowhere/python3 is not a working Python" in debian.problem("/nowhere/python3")


def test_a_missing_venv_module_names_its_package(debian: Machine) -> None:
    debian.add("python3", python_without("ensurepip"))
    assert with_compiler(debian).problem().endswith(f"fix: sudo apt-get install python{VERSION}-venv")


def test_missing_headers_name_their_package(debian: Machine) -> None:
    debian.add("python3", python_without("Python.h"))
    assert with_compiler(debian).problem().endswith(f"fix: sudo apt-get install python{VERSION}-dev")


def test_a_missing_compiler_names_its_package(debian: Machine) -> None:
    debian.add("python3", f'exec {sys.executable} "$@"')
    line = debian.problem()
    assert "no C compiler" in line
    assert line.endswith("fix: sudo apt-get install gcc libc6-dev")


def test_a_compiler_without_the_c_library_is_noticed(debian: Machine) -> None:
    debian.add("python3", f'exec {sys.executable} "$@"')
    debian.add("gcc", "exit 1")
    assert "gcc compiles no program" in debian.problem()


def test_a_mac_without_command_line_tools_is_told_how_to_get_them(macos: Machine) -> None:
    macos.add("xcode-select", "exit 2")
    assert macos.problem().endswith("fix: xcode-select --install")


def test_a_mac_without_python_is_sent_to_homebrew(macos: Machine) -> None:
    assert "fix: brew install python" in macos.problem()


def test_a_mac_whose_compiler_fails_is_told_of_tools_and_license(macos: Machine) -> None:
    macos.add("python3", f'exec {sys.executable} "$@"')
    macos.add("gcc", "exit 1")
    assert machine_fix(macos) == "xcode-select --install, and with Xcode: sudo xcodebuild -license accept"


def test_a_python_for_intel_on_an_apple_chip_is_refused(macos: Machine) -> None:
    macos.add("sysctl", "echo 1")
    macos.add("python3", f'case "$*" in *platform*) echo x86_64;; *) exec {sys.executable} "$@";; esac')
    assert "python3 runs as Intel code, under Rosetta" in macos.problem()


def machine_fix(machine: Machine) -> str:
    return machine.problem().partition("; fix: ")[2]
