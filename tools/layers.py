# SPDX-License-Identifier: Apache-2.0
"""Holds imports to the layers of docs/architecture.md, tests to shared code, and packages to their READMEs.

    python tools/layers.py        # prints what breaks a rule; exit status 1 if anything does

The table under "Layers" is the only one there is. A module may import what stands in a row below its own, and its own
package; names of one row know nothing of each other unless ``⇄`` joins them. Imports inside functions and for type
checking count too.  Not handled: imports by name (``import_module``), which ``lily/__init__.py`` alone has.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = "docs/architecture.md"
_CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+(lily[\w.]*)\s+c?import|c?import\s+(lily[\w.]*))", re.MULTILINE)


@dataclass(frozen=True)
class Layers:
    """``rank``: of each module or package of ``lily/``, 0 on top; ``joined``: pairs that may import each other."""

    rank: dict[str, int]
    joined: frozenset[tuple[str, str]]

    @classmethod
    def read(cls, text: str) -> Layers:
        """The rows of the table under the heading "Layers": names in backticks in their first column."""
        section = text.split("## Layers\n", 1)[1].split("\n## ", 1)[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
        rows = [cell for cell in cells if "`" in cell]
        rank: dict[str, int] = {}
        for number, row in enumerate(rows):
            for name in re.findall(r"`(\w+)`", row):
                if name in rank:
                    raise ValueError(f"{name} stands in two rows of {TABLE}")
                rank[name] = number
        pairs = [pair for row in rows for pair in re.findall(r"`(\w+)` ⇄ `(\w+)`", row)]
        return cls(rank, frozenset(pairs) | {(b, a) for a, b in pairs})

    def allow(self, importer: str, imported: str) -> bool:
        """Whether one may import the other; the names of both are in the table."""
        below = self.rank[imported] > self.rank[importer]
        return below or importer == imported or (importer, imported) in self.joined


def modules(root: Path) -> set[str]:
    """Dotted names of all modules and packages of ``lily/``."""
    return {_dotted(path.relative_to(root)) for suffix in ("py", "pyx") for path in root.glob(f"lily/**/*.{suffix}")}


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(source: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module of Lily) of every import; ``from lily import structs`` imports ``lily.structs``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found = [f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in dict.fromkeys(found) if name.split(".")[0] in ("", "lily"))


def _cython_imports(source: str) -> Iterator[tuple[int, str]]:
    for match in _CYTHON_IMPORT.finditer(source):
        yield source.count("\n", 0, match.start()) + 1, match[1] or match[2]


def _unit(module: str) -> str:
    """The name that the table has for a module: its package, or itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def upward_imports(root: Path = ROOT) -> list[str]:
    """What breaks the table, a line each, with file and line."""
    layers, known, problems = Layers.read((root / TABLE).read_text(encoding="utf-8")), modules(root), []
    for path in sorted(p for suffix in ("py", "pyx", "pyi") for p in root.glob(f"lily/**/*.{suffix}")):
        shown = path.relative_to(root)
        importer = _unit(_dotted(shown))
        if importer not in layers.rank:
            problems.append(f"{shown}: {importer} is in no row of the layers in {TABLE}; give it one")
            continue
        source = path.read_text(encoding="utf-8")
        found = _cython_imports(source) if path.suffix == ".pyx" else imports(source, known)
        for line, module in found:
            imported = _unit(module)
            if imported not in layers.rank:
                problems.append(f"{shown}:{line}: imports {module}, which is in no row of the layers in {TABLE}")
            elif not layers.allow(importer, imported):
                problems.append(f"{shown}:{line}: {importer} imports {module}, which is not below it ({TABLE}, Layers)")
    for name in sorted(set(layers.rank) - {_unit(module) for module in known}):
        problems.append(f"{TABLE}: there is no module {name} any more; take it out of the layers")
    return problems


def imported_tests(root: Path = ROOT) -> list[str]:
    """Test modules that another file of tests/, tools/ or bench/ imports: what several need lies in tests/support."""
    problems = []
    for path in sorted(p for folder in ("tests", "tools", "bench") for p in root.glob(f"{folder}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            else:
                continue
            for name in names:
                if name.split(".")[-1].startswith("test_"):
                    shown = path.relative_to(root)
                    problems.append(f"{shown}:{node.lineno}: imports {name}; move what both need to tests/support")
    return problems


def modules_without_a_line(root: Path = ROOT) -> list[str]:
    """Modules of a package that the table of its README does not name."""
    problems = []
    for package in sorted(path.parent for path in root.glob("lily/*/__init__.py")):
        readme = package / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        named = set(re.findall(r"`(\w+\.pyx?)`", "".join(line for line in text.splitlines() if line.startswith("|"))))
        there = {path.name for suffix in ("py", "pyx") for path in package.glob(f"*.{suffix}")} - {"__init__.py"}
        shown = readme.relative_to(root)
        problems += [f"{shown}: says nothing of {name}; give it a row" for name in sorted(there - named)]
        problems += [f"{shown}: there is no {name} any more; take it out" for name in sorted(named - there)]
    return problems


def main() -> int:
    """Prints every problem."""
    problems = upward_imports() + imported_tests() + modules_without_a_line()
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
