# SPDX-License-Identifier: Apache-2.0
"""What the distributions should hold, by rules of their own: nothing here is read from setup.py or pyproject.toml.

A file under ``lily/`` that no rule knows is an error, so that whoever adds a new kind of file says where it belongs.
Not handled: the contents of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# By the end of a file's name.
IN_BOTH = (".py", ".pyi", "py.typed")
IN_SDIST = (".c", ".m", ".h", ".pyx", ".pxd")
IN_NEITHER = ("README.md",)
# Folders whose files are data: all of them are in both.
DATA = ("lily/models/", "lily/msl/include/", "lily/server/web/")
# What building leaves in a checkout.
BUILT = (".so", ".dylib", ".pyc", ".metallib", "metallib.stamp")

DIST_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE", "top_level.txt")
SDIST_ROOT = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "NOTICE", "README.md", "pyproject.toml", "setup.py")


def _package_files(repository: Path) -> Iterator[str]:
    for path in sorted((repository / "lily").rglob("*")):
        name = path.relative_to(repository).as_posix()
        if path.is_file() and not name.startswith("lily/data/") and not name.endswith(BUILT):
            yield name


def _kind(name: str) -> tuple[str, ...]:
    """The distributions that a file of the package belongs into."""
    if name.startswith(DATA) or name.endswith(IN_BOTH):
        return "wheel", "sdist"
    if name.endswith(IN_SDIST):
        return ("sdist",)
    assert name.endswith(IN_NEITHER), f"{name}: package_contents.py has no rule for such a file; is it to be shipped?"
    return ()


def cython_modules(repository: Path) -> list[str]:
    """Cython modules as paths without their ending: lily/_pack."""
    modules = [name.removesuffix(".pyx") for name in _package_files(repository) if name.endswith(".pyx")]
    assert modules, "no Cython module found"
    return modules


def shaders(repository: Path) -> set[str]:
    """Sources of the shaders as paths in the repository."""
    found = {p.relative_to(repository).as_posix() for p in (repository / "shaders").rglob("*")}
    return {name for name in found if name.endswith((".metal", ".h"))}


def wheel_files(repository: Path, module_suffix: str, libraries: set[str], dist_info: str) -> set[str]:
    """Every file of a wheel whose Cython modules end with ``module_suffix``; ``libraries`` are the device libraries."""
    names = {name for name in _package_files(repository) if "wheel" in _kind(name)}
    names |= {f"lily/data/{name}" for name in shaders(repository)}
    names |= {module + module_suffix for module in cython_modules(repository)}
    return names | libraries | {f"{dist_info}/{name}" for name in DIST_INFO}


def sdist_files(repository: Path) -> set[str]:
    """What an sdist needs; it may hold metadata besides."""
    names = {name for name in _package_files(repository) if "sdist" in _kind(name)}
    whole = [path for folder in ("objc_shim", "shaders") for path in (repository / folder).rglob("*")]
    names |= {path.relative_to(repository).as_posix() for path in whole if path.is_file()}
    return names | set(SDIST_ROOT)
