# SPDX-License-Identifier: Apache-2.0
"""The check of imports that ``make lint`` makes: it passes here, and finds what is planted in a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.layers import TABLE, Layers, imported_tests, imports, modules_without_a_line, upward_imports


def test_imports_obey_the_layers(repository: Path) -> None:
    assert upward_imports(repository) == []


def test_no_test_module_is_imported(repository: Path) -> None:
    assert imported_tests(repository) == []


def test_each_package_has_a_readme_that_names_its_modules(repository: Path) -> None:
    assert modules_without_a_line(repository) == []


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The package's Python and the table, to plant something in."""
    ignore = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__", "data", "models", "cpu", "metal")
    shutil.copytree(repository / "lily", tmp_path / "lily", ignore=ignore)
    (tmp_path / "docs").mkdir()
    shutil.copy(repository / TABLE, tmp_path / TABLE)
    return tmp_path


PLANTED = {
    "at the top": ("lily/plan/tiles.py", "from lily.device.device import Device\n", "lily.device.device"),
    "of a module from its package": ("lily/units.py", "from lily import structs\n", "lily.structs"),
    "of the whole package": ("lily/errors.py", "import lily\n", "lily"),
    "inside a function": ("lily/run/chunks.py", "def f():\n    from lily.engine import Engine\n", "lily.engine"),
    "for type checking": ("lily/device/kinds.py", "if TYPE_CHECKING:\n    import lily.run.budget\n", "lily.run.budget"),
    "within a row": ("lily/plan/tiles.py", "from lily.msl.flatten import flatten\n", "lily.msl.flatten"),
    "in Cython": ("lily/run/_submit.pyx", "from lily.engine import Engine\n", "lily.engine"),
    "in a stub": ("lily/run/_submit.pyi", "from lily.engine import Engine\n", "lily.engine"),
}


@pytest.mark.parametrize("where", PLANTED)
def test_an_upward_import_is_found(copy: Path, where: str) -> None:
    file, text, module = PLANTED[where]
    with (copy / file).open("a") as f:
        f.write(text)
    line = (copy / file).read_text().count("\n")
    [problem] = upward_imports(copy)
    assert problem.startswith(f"{file}:{line}: ")
    assert f" imports {module}, which is not below it" in problem


def test_modules_and_rows_without_their_counterpart_are_found(copy: Path) -> None:
    (copy / "lily" / "gateway.py").write_text("")
    (copy / "lily" / "units.py").unlink()
    problems = upward_imports(copy)
    assert "lily/gateway.py: gateway is in no row of the layers in docs/architecture.md; give it one" in problems
    assert "docs/architecture.md: there is no module units any more; take it out of the layers" in problems


def test_rows_are_read_from_the_table() -> None:
    table = "## Layers\n\n| modules |\n|---|\n| `a` ⇄ `b`, `c` | `x` |\n| `d` |\n\n## Next\n| `e` |\n"
    layers = Layers.read(table)
    assert layers.rank == {"a": 0, "b": 0, "c": 0, "d": 1}
    allowed = {(x, y) for x in "abcd" for y in "abcd" if x != y and layers.allow(x, y)}
    assert allowed == {("a", "b"), ("b", "a"), ("a", "d"), ("b", "d"), ("c", "d")}
    with pytest.raises(ValueError, match="a stands in two rows"):
        Layers.read("## Layers\n| `a` |\n| `a` |\n")


def test_relative_imports_are_seen_too() -> None:
    assert list(imports("from . import x\nimport numpy\n", set())) == [(1, ".")]


@pytest.mark.parametrize("text", ["import test_one\n", "from test_one import f\n", "from cpu import test_one\n"])
def test_an_import_of_a_test_module_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_two.py").write_text(f"import os\n{text}")
    [problem] = imported_tests(tmp_path)
    assert problem.startswith("tests/test_two.py:2: imports ")


def test_a_readme_that_is_missing_or_out_of_date_is_found(copy: Path) -> None:
    (copy / "lily" / "text" / "stops.py").rename(copy / "lily" / "text" / "endings.py")
    (copy / "lily" / "run" / "README.md").unlink()
    problems = modules_without_a_line(copy)
    assert "lily/text/README.md: says nothing of endings.py; give it a row" in problems
    assert "lily/text/README.md: there is no stops.py any more; take it out" in problems
    assert "lily/run/README.md: says nothing of runner.py; give it a row" in problems
