# SPDX-License-Identifier: Apache-2.0
"""Finds code in docstrings and comments that is not written in double backticks.

    python tools/docstrings.py        # prints file and line of each; exit status 1 if there is any

What ruff's rules for docstrings do not say.  Not handled: docstrings of click commands, which are their ``--help``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lily", "tests", "tools", "bench", "setup.py")
SINGLE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def is_command(node: ast.AST) -> bool:
    """Whether click shows the docstring of ``node`` to users."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(re.search(r"\b(command|group)\b", ast.unparse(decorator)) for decorator in decorators)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of a module, but for those of commands."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or is_command(node):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


def lines_of_text(source: str) -> set[int]:
    """Numbers of the lines that lie in docstrings, from 1."""
    return {n for d in docstrings(ast.parse(source)) for n in range(d.lineno, (d.end_lineno or d.lineno) + 1)}


def comments(source: str) -> Iterator[tuple[int, int]]:
    """(line, column) of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start


def single_backticks(source: str) -> list[tuple[int, str]]:
    """(line, what) of all that is in single backticks."""
    lines, found = source.splitlines(), []
    places = dict.fromkeys(lines_of_text(source), 0) | dict(comments(source))
    for number, column in sorted(places.items()):
        found += [(number, match[0]) for match in SINGLE.finditer(lines[number - 1][column:])]
    return found


def files(root: Path = ROOT) -> list[Path]:
    """All Python of the repository."""
    return sorted(
        p for name in FOLDERS for p in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    )


def main() -> int:
    """Prints every problem."""
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {what} in a docstring or comment; write `{what}`"
        for path in files()
        for line, what in single_backticks(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
