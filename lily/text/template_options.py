# SPDX-License-Identifier: Apache-2.0
"""Which options a chat template knows, and which of them it asks for true or false only.

Not handled: options that a template hands to a macro as an argument and tests there; they are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

_ASKING = ("true", "false", "boolean")  # tests of a value's truth
_NEUTRAL = ("defined", "undefined", "none")  # tests that fit a value of any kind


def options_of(tree: nodes.Template) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the template takes from outside, and those of them that are flags: asked for true or false only."""
    names = frozenset(find_undeclared_variables(tree))
    uses: dict[str, list[bool]] = {}
    _note_uses(tree, False, uses)
    return names, frozenset(name for name in names if uses.get(name) and all(uses[name]))


def _note_uses(node: nodes.Node, truth: bool, uses: dict[str, list[bool]]) -> None:
    """Adds to ``uses`` for each name whether it is asked for its truth, at each place where it stands."""
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            uses.setdefault(node.name, []).append(truth)
        return
    if isinstance(node, nodes.Test) and node.name in _NEUTRAL and isinstance(node.node, nodes.Name):
        return
    asked = list(_asked_for_truth(node, truth))
    for child in node.iter_child_nodes():
        _note_uses(child, any(child is other for other in asked), uses)


def _asked_for_truth(node: nodes.Node, truth: bool) -> Iterable[nodes.Node]:
    """Those children of ``node`` of which only the truth counts; ``truth``: so it is with the node itself."""
    if isinstance(node, (nodes.If, nodes.CondExpr)) or (isinstance(node, nodes.For) and node.test is not None):
        yield node.test  # type: ignore[misc]
    if truth and isinstance(node, nodes.CondExpr):
        yield from (part for part in (node.expr1, node.expr2) if part is not None)
    if isinstance(node, nodes.Not) or (isinstance(node, nodes.Test) and node.name in _ASKING):
        yield from node.iter_child_nodes()
    if isinstance(node, (nodes.And, nodes.Or)) and truth:
        yield from (node.left, node.right)
    if isinstance(node, nodes.Compare) and all(op.op in ("eq", "ne") and _is_flag(op.expr) for op in node.ops):
        yield node.expr
    is_default = isinstance(node, nodes.Filter) and node.name in ("default", "d")
    if is_default and (truth or any(map(_is_flag, node.args[:1]))):  # type: ignore[attr-defined]
        yield node.node  # type: ignore[attr-defined]


def _is_flag(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, bool)
