# SPDX-License-Identifier: Apache-2.0
"""Runs chat templates, which come with downloads: in Jinja's sandbox, and with their work counted.

The sandbox keeps a template from files, imports and private attributes. It does not keep it from running for ever or
from filling the memory, so everything that repeats is counted here, never timed: the same template ends the same way
on every machine.
* A step is a node of the template that is evaluated (a body of a loop, macro or block pays for all its nodes when it
  begins), or an element of a list that an operator, filter or method goes through.
* A character is one of the text that is made or gone through: written, joined, repeated, padded, searched.
What makes much from little (``*``, ``**``, ``%``, ``join``, ``replace``, ``center`` …) pays before it is done.

Not handled: callables that the caller himself hands over as options of a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 20_000_000
"""Of one rendering; a chat of 10,000 messages takes about 3 million with the 35B model's template."""
MAX_CHARACTERS = 1 << 28
"""Of one rendering: some two hundred times the text that fits into the model's context."""

_NATIVE = 4  # elements that are copied for the price of one step; they take 32 bytes
_CALLING = 8  # steps for every element for which a filter calls another filter or a test
_WEIGHING = 4  # steps for every element of which the size is asked
_COMPARED_AT_ONCE = 16  # characters, by what compares every place of a text with all of another one
_LOOP_STEPS = 4  # of an iteration, beside those of its body
_MAX_DEPTH = 100  # of lists in lists; deeper ones would end in the interpreter's stack
_MAX_BITS = 1 << 14  # of a whole number; more digits than Python itself would write
_MAX_PRECISION = 300  # of round; beyond the digits of any float
# Names of filters that no template can name.
_STEP, _TEXT, _COPIED, _SEARCHED, _COMPARED, _HASHED = " step", " text", " copied", " searched", " compared", " hashed"


class TemplateLimitError(Exception):
    """A template does more than it may."""


class Work:
    """What is left of one rendering's steps and characters."""

    __slots__ = ("characters", "steps")

    def __init__(self) -> None:
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS

    def step(self, count: int) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(f"more than {MAX_STEPS:,} steps")

    def spell(self, count: int) -> None:
        self.characters -= count
        if self.characters < 0:
            raise TemplateLimitError(f"more than {MAX_CHARACTERS:,} characters of text made or searched")

    def pass_over(self, value: object) -> None:
        """Pays for one native walk through ``value`` that does not go deep, such as a copy."""
        if isinstance(value, (str, bytes)):
            self.spell(len(value))
        elif isinstance(value, (list, tuple, dict, range, set, frozenset)):
            self.step(1 + len(value) // _NATIVE)

    def weigh(self, value: object) -> tuple[int, int]:
        """Pays for all that ``value`` holds, as often as it is held; returns (elements, depth)."""
        elements = deepest = 0
        open_: list[tuple[object, int]] = [(value, 1)]
        while open_:
            value, depth = open_.pop()
            if isinstance(value, (str, bytes)):
                self.spell(len(value))
                continue
            if isinstance(value, range):
                self.step(len(value))
                elements += len(value)
            children = _children(value)
            if children is None:
                continue
            if depth > _MAX_DEPTH:
                raise TemplateLimitError(f"lists in lists, more than {_MAX_DEPTH} deep")
            self.step(_WEIGHING * (1 + len(children)))
            elements += len(children)
            deepest = max(deepest, depth)
            open_ += [(child, depth + 1) for child in children]
        return elements, deepest

    def count(self, values: Iterator[Any], each: int = 1) -> Iterator[Any]:
        """The same values, paid for one at a time."""
        for value in values:
            self.step(each)
            yield value


def _children(value: object) -> Sequence[Any] | None:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Namespace):
        value = vars(value).get("_Namespace__attrs", {})
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    return None


_work: ContextVar[Work | None] = ContextVar("work", default=None)


def _current() -> Work:
    return _work.get() or Work()


def compile_template(source: str, environment: jinja2.Environment) -> jinja2.Template:
    """The template with its counters; raises whatever Jinja, or the compiler of Python behind it, raises."""
    token = _work.set(Work())  # constants are computed while it is compiled
    try:
        tree = _Counters().visit(environment.parse(source))
        tree.set_environment(environment)
        return environment.from_string(tree)
    finally:
        _work.reset(token)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text of a template; raises whatever its expressions raise, and TemplateLimitError."""
    token = _work.set(Work())
    try:
        return template.render(variables)
    finally:
        _work.reset(token)


class _Counters(NodeTransformer):
    """Puts the counters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        price = _LOOP_STEPS + _price(node.body)
        self.generic_visit(node)
        node.body.insert(0, _paying(price, node.lineno))
        if node.test is not None:
            paid = _filter(nodes.Const(_LOOP_STEPS + _price([node.test])), _STEP)
            node.test = nodes.And(paid, node.test)
        return node

    def _visit_body(self, node: Any) -> nodes.Node:
        price = _LOOP_STEPS + _price(node.body)
        self.generic_visit(node)
        node.body.insert(0, _paying(price, node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if _is_literal(part) else _filter(part, _TEXT) for part in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """A sum of texts or lists is as long as its parts: they pay."""
        self.generic_visit(node)
        for side in ("left", "right"):
            part = getattr(node, side)
            if not isinstance(part, nodes.Add) and not _is_literal(part):
                setattr(node, side, _filter(part, _COPIED))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        left: nodes.Expr = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                operand.expr = right if _is_literal(right) else _filter(right, _SEARCHED)
            elif not _is_literal(left) and not _is_literal(right):  # no longer than the shorter of the two
                operand.expr = _filter(right, _COMPARED)
            left = right
        if node.ops[0].op in ("in", "notin") and not _is_literal(node.expr):
            node.expr = _filter(node.expr, _HASHED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, _COPIED)
        elif not _is_literal(node.arg):
            node.arg = _filter(node.arg, _HASHED)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_literal(node.key):
            node.key = _filter(node.key, _HASHED)
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _paying(price: int, line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(price, lineno=line), _STEP), lineno=line)


def _price(children: Iterable[nodes.Node]) -> int:
    """Nodes that are evaluated with ``children``, without those that pay for themselves."""
    price = 0
    open_ = list(children)
    while open_:
        node = open_.pop()
        price += 1
        if isinstance(node, nodes.For):
            open_ += [node.iter, *node.else_]
        elif not isinstance(node, (nodes.Macro, nodes.Block)):
            open_ += node.iter_child_nodes(exclude=("body",) if isinstance(node, nodes.CallBlock) else None)
    return price


def _is_literal(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_literal, node.items))
    return isinstance(node, (nodes.Const, nodes.TemplateData))


# ---- filters that are put in by _Counters
@pass_context
def _step(context: Context, price: int) -> bool:
    work = _work.get()
    if work is not None:
        work.step(price)
    return True


def _text(value: Any) -> Any:
    """``value``, about to be written: itself, so that its type still decides how."""
    if type(value) is str:
        return value
    _current().weigh(value)
    return value


def _joined(value: Any) -> Any:
    if type(value) is str:
        _current().spell(len(value))
    else:
        _current().weigh(value)
    return value


def _copied(value: Any) -> Any:
    if type(value) is str:
        _current().spell(len(value))
    else:
        _current().pass_over(value)
    return value


def _searched(value: Any) -> Any:
    if type(value) is str:
        _current().spell(len(value))
    elif not isinstance(value, (dict, set, frozenset, range)):
        _current().weigh(value)
    return value


def _hashed(value: Any) -> Any:
    if isinstance(value, tuple):
        _current().weigh(value)
    return value


# ---- what filters, methods and operators cost
Price = Callable[[Work, Sequence[Any], Mapping[str, Any]], None]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _size(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _flat_size(value: object) -> int:
    return _whole(value) + (sum(map(_size, value)) if isinstance(value, (list, tuple)) else _size(value))


def _whole(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _linear(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        work.pass_over(value)


def _deep(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        work.weigh(value)


def _each(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Python code for each element, which may look up a chain of attributes."""
    extra = sum(_size(value) for value in (*args[1:], *kwargs.values()))
    work.step(len(args[0]) * (_CALLING + extra // _NATIVE) if hasattr(args[0], "__len__") else 1)


def _compared(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Search from the right, and characters that are stripped: every place may be compared with the whole argument."""
    work.spell(_size(args[0]) * _comparisons(*args[1:], *kwargs.values()))


def _comparisons(*values: object) -> int:
    return 1 + sum(map(_size, values)) // _COMPARED_AT_ONCE


def _padded(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    work.spell(_size(args[0]) + _whole(_argument(args, kwargs, 1, "width", 80)))


def _indented(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    width = _argument(args, kwargs, 1, "width", 4)
    text = str(args[0])
    work.spell(len(text) + (text.count("\n") + 1) * (_size(width) or _whole(width)))


def _wrapped(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    end = _argument(args, kwargs, 3, "wrapstring", None)
    work.spell(len(str(args[0])) * (1 + _size(end)))


def _replaced(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    text, old, new = args[0], _argument(args, kwargs, 1, "old", ""), _argument(args, kwargs, 2, "new", "")
    if isinstance(text, (str, bytes)) and isinstance(old, type(text)):
        work.spell(len(text) + text.count(old) * _size(new))  # type: ignore[arg-type]
    else:
        _deep(work, args, kwargs)
        work.spell((len(str(text)) + 1) * len(str(new)))


def _separated(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Filter: join(values, separator)."""
    elements, _ = work.weigh(args[0])
    work.spell(elements * len(str(_argument(args, kwargs, 1, "d", ""))))


def _joining(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Method: separator.join(values)."""
    elements, _ = work.weigh(args[1]) if len(args) > 1 else (0, 0)
    work.spell(elements * _size(args[0]))


def _formatted(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths stand in the text or, with ``*`` and nested fields, among the values; a value may stand in many fields."""
    text = str(args[0])
    widths = sum(int(digits[:18]) for digits in re.findall(r"\d+", text))
    before = work.characters
    _deep(work, (*args[1:], *kwargs.values()), {})
    values, numbers = before - work.characters, list(_numbers((*args[1:], *kwargs.values())))
    values += sum(number.bit_length() for number in numbers)
    if "*" in text or re.search(r"\{[^}]*\{", text):
        values += max(map(abs, numbers), default=0)
    work.spell(len(text) + widths + max(text.count("%"), text.count("{")) * values)


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        else:
            yield from _numbers(_children(value) or ())


def _cut(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """batch and slice: lists are filled up, or empty, to that number."""
    _each(work, args[:1], {})
    work.step(_whole(args[1]) if len(args) > 1 else max(map(_whole, kwargs.values()), default=0))


def _summed(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Lists are added one after the other, each sum a copy."""
    elements, _ = work.weigh(args[0])
    if isinstance(_argument(args, kwargs, 2, "start", 0), (list, tuple)):
        work.step(elements * elements // _NATIVE)


def _rounded(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if _whole(_argument(args, kwargs, 1, "precision", 0)) > _MAX_PRECISION:
        raise TemplateLimitError(f"round to more than {_MAX_PRECISION} digits")


def _dumped(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """tojson and pprint: lines are indented by their depth."""
    elements, depth = work.weigh(args[0])
    indents = [_flat_size(value) for value in (*args[1:], *kwargs.values())]
    work.spell(elements * depth * sum(indents))


def _expanded(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    text, tab = args[0], _whole(_argument(args, kwargs, 1, "tabsize", 8))
    work.spell(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tab)


def _dated(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    work.spell(256 * sum(map(_size, (*args, *kwargs.values()))))


def _forbidden(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    raise TemplateLimitError("a method that turns numbers or tables into text of any length")


_FREE = ("abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "random")
_FILTERS: dict[str, Price] = {
    **dict.fromkeys(("list", "reverse", "wordcount", "capitalize", "lower", "upper", "safe", "title", "int"), _linear),
    **dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr"), _each),
    "batch": _cut,
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "join": _separated,
    "pprint": _dumped,
    "replace": _replaced,
    "round": _rounded,
    "slice": _cut,
    "sum": _summed,
    "tojson": _dumped,
    "trim": _compared,
    "wordwrap": _wrapped,
}
_PER_ELEMENT = ("dictsort", "groupby", "max", "min", "sort", "unique")  # deep, and for each element
# Tests that take longer for a longer value.
_TESTS = (
    "in", "lower", "upper", "eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<",
    "lessthan", "le", "<=",
)  # fmt: skip
_METHODS: dict[str, Price] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("to_bytes", "from_bytes", "translate", "maketrans"), _forbidden),
    **dict.fromkeys(("get", "items", "keys", "values"), lambda work, args, kwargs: _deep(work, args[1:], kwargs)),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"), _compared),
    **dict.fromkeys(("startswith", "endswith"), lambda work, args, kwargs: _linear(work, args[1:], kwargs)),
    "expandtabs": _expanded,
    "format": _formatted,
    "format_map": _formatted,
    "join": _joining,
    "replace": _replaced,
}


_PLAIN = frozenset((str, LoopContext, Namespace))
_OWN = ("_loop_vars", "_block_vars")  # what Jinja itself passes to every call
# Of text, linear, and without names for their arguments.
_PLAIN_METHODS = frozenset(("endswith", "find", "lstrip", "rfind", "rstrip", "startswith", "strip"))


def _sorted_price(work: Work, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _deep(work, args, kwargs)
    _each(work, args, kwargs)


def _with_price(function: Callable[..., Any], price: Price) -> Callable[..., Any]:
    """``function``, a filter or test of Jinja, which pays before it works and for what it gives."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # takes over what Jinja is to pass first
    def paid(*args: Any, **kwargs: Any) -> Any:
        work = _current()
        if len(args) > skip and _is_iterator(args[skip]):
            args = (*args[:skip], list(work.count(args[skip])), *args[skip + 1 :])
        if len(args) > skip:
            price(work, args[skip:], kwargs)
        return _paid_result(work, function(*args, **kwargs), args[skip:])

    return paid


def _is_iterator(value: object) -> bool:
    return hasattr(type(value), "__next__")


def _paid_result(work: Work, result: Any, args: Sequence[Any] = ()) -> Any:
    if isinstance(result, str):
        work.spell(len(result))
    elif isinstance(result, (list, tuple)):
        work.step(len(result) // _NATIVE)
    elif _is_iterator(result):
        return work.count(result, _WEIGHING + sum(map(_size, args[1:])) // _NATIVE)
    return result


def _multiply(left: Any, right: Any) -> Any:
    work = _current()
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, (str, bytes)):
            work.spell(len(many) * max(times, 0))
        elif isinstance(times, int) and isinstance(many, (list, tuple)):
            work.step(len(many) * max(times, 0))
    return _bounded(left) * _bounded(right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _MAX_BITS:
        raise TemplateLimitError(f"a number of more than {_MAX_BITS} bits")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, (str, bytes)):
        _formatted(_current(), (left, right), {})
    return _bounded(left) % _bounded(right)


def _divide(left: Any, right: Any) -> Any:
    return _bounded(left) // _bounded(right)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise TemplateLimitError(f"a number of more than {_MAX_BITS} bits")
    return value


class CountingEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which whatever repeats is paid for. For templates of ``compile_template`` only."""

    intercepted_binops = frozenset(("*", "**", "%", "//"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_text, **options)
        self.binop_table |= {"*": _multiply, "**": _power, "%": _modulo, "//": _divide}
        del self.globals["lipsum"]  # made to fill pages
        self.filters |= {_STEP: _step, _TEXT: _joined, _COPIED: _copied}
        self.filters |= {_SEARCHED: _searched, _COMPARED: _joined, _HASHED: _hashed}

    def price_filters(self) -> None:
        """To be called once all filters are there."""
        for name, function in self.filters.items():
            if not name.startswith(" ") and name not in _FREE:
                price = _sorted_price if name in _PER_ELEMENT else _FILTERS.get(name, _deep)
                self.filters[name] = _with_price(function, price)
        for name in _TESTS:
            self.tests[name] = _with_price(self.tests[name], _deep)  # type: ignore[arg-type]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # What Jinja asks besides concerns functions, classes, lists and dicts; it takes most of a rendering's time.
        if type(obj) in _PLAIN:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        if kind is Macro:  # its body pays
            return __context.call(__obj, *args, **kwargs)
        work = _current()
        if kind is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in _PLAIN_METHODS and args:
            # Most calls of most templates: safe, and nothing of what Jinja adds to a call concerns them.
            work.spell(len(__obj.__self__) * _comparisons(args[0]))
            return _paid_result(work, __obj(*args))
        price: Price
        given: Sequence[Any] = args
        if kind is FunctionType:
            text = getattr(getattr(__obj, "__wrapped__", None), "__self__", None)  # of Jinja's own form of str.format
            price = _formatted if isinstance(text, str) else _dated
            given = (text, *args) if isinstance(text, str) else args
        elif kind is BuiltinMethodType or kind is MethodType:
            price, given = _METHODS.get(__obj.__name__, _deep), (__obj.__self__, *args)
        else:
            price = _deep
        if args and _is_iterator(args[-1]):
            args = (*args[:-1], list(work.count(args[-1])))
            given = (*given[:-1], args[-1])
        price(work, given, {name: value for name, value in kwargs.items() if name not in _OWN} if kwargs else kwargs)
        result = ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)
        return _paid_result(work, result)

    def concat(self, pieces: Iterable[str]) -> str:
        """Of a template, a macro or a block; every piece has been paid for by a step, their text is paid for here."""
        parts = list(pieces)
        _current().spell(sum(map(len, parts)))
        return "".join(parts)
