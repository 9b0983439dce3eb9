# SPDX-License-Identifier: Apache-2.0
"""What ``make build`` installs: the command, and a package that type checkers find as Python does.

Not handled: compiling, which ``make`` has done before; wheels (test_packaging.py).
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PROGRAM = """\
import lily
reveal_type(lily.Engine().generate("x", max_tokens=5).text)
lily.Engine().generate("x", max_tokns=5)
"""


def checked(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A virtual environment that ``make build`` has put Lily into; its other packages are those of this one."""
    folder = tmp_path_factory.mktemp("built") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    checked(["make", "-o", "compile", f"VENV={folder}", str(folder / "bin" / "lily")], repository)
    return folder


@pytest.mark.full
def test_the_command_runs_from_anywhere(built: Path, tmp_path: Path) -> None:
    flags = ["generate", "Hi", "--quiet", "--seed", "1", "--max-tokens", "3"]
    assert checked([built / "bin" / "lily", *flags], tmp_path).strip()


@pytest.mark.full
def test_a_type_checker_finds_the_package_and_a_misspelt_argument(built: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(built / "bin" / "python")]
    done = subprocess.run(
        [*mypy, "program.py"], cwd=tmp_path, capture_output=True, text=True, env={"HOME": str(tmp_path)}
    )
    lines = done.stdout.splitlines()
    assert lines[0] == 'program.py:2: note: Revealed type is "str"'
    assert lines[1].startswith('program.py:3: error: Unexpected keyword argument "max_tokns"')
    assert done.returncode == 1
