# SPDX-License-Identifier: Apache-2.0
"""Places of a Python source where an operator can plant a fault, found in its syntax tree.

Only bodies of functions are looked at. Left alone: what is raised or asserted, strings, annotations, decorators.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.mutants.change import Change

_SWAPPED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_LARGEST = 4096  # numbers beyond it are sizes, where one more or less says little
_SILENT = ("__repr__", "__str__")


def python_places(file: str, text: str) -> list[Change]:
    """All faults that the operators can plant in ``text``."""
    return list(_Finder(file, text).found())


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.starts = [0]
        self.lines = text.splitlines(keepends=True)
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def found(self) -> Iterator[Change]:
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name not in _SILENT:
                for statement in node.body:
                    yield from self._statement(statement)

    def _at(self, line: int, column: int) -> int:
        """The place of an ast position, whose column counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore

    def _change(self, start: int, end: int, new: str, operator: str) -> Change:
        return Change(self.file, start, end, new, operator)

    def _statement(self, node: ast.stmt) -> Iterator[Change]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assert)):
            return  # functions come by themselves
        if _can_go(node):
            yield self._change(*self._span(node), "pass", "statement")
        if isinstance(node, ast.Raise):
            return
        for _, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.stmt):
                    yield from self._statement(item)
                elif isinstance(item, ast.AST) and not (isinstance(node, ast.AnnAssign) and item is node.annotation):
                    yield from self._expression(item)

    def _expression(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            return
        if isinstance(node, ast.Compare):
            yield from self._comparisons(node)
        if isinstance(node, ast.BinOp):
            yield from self._one_less(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child)
                continue
            if isinstance(node, (ast.Slice, ast.Compare, ast.BinOp, ast.Call)):
                yield from self._one_more(child)
            yield from self._expression(child)

    def _comparisons(self, node: ast.Compare) -> Iterator[Change]:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old, new = _SWAPPED[type(operator)]
            start, end = self._span(left)[1], self._span(right)[0]
            at = re.search(rf"(?<![\w<>=!]){old}(?![\w<>=])".replace(" ", r"\s+"), self.text[start:end])
            if at:
                yield self._change(start + at.start(), start + at.end(), new, "comparison")
            left = right

    def _one_less(self, node: ast.BinOp) -> Iterator[Change]:
        """``x + 1`` and ``x - 1`` become ``x``."""
        if isinstance(node.op, (ast.Add, ast.Sub)) and _number(node.right) == 1:
            yield self._change(self._span(node.left)[1], self._span(node)[1], "", "off-by-one")

    def _one_more(self, node: ast.AST) -> Iterator[Change]:
        value = _number(node)
        if value is not None and value <= _LARGEST:
            yield self._change(*self._span(node), str(value + 1), "off-by-one")


def _number(node: ast.AST) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _can_go(node: ast.stmt) -> bool:
    """Whether ``pass`` in its place leaves a program: calls, assignments to places, raise."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise))
