# SPDX-License-Identifier: Apache-2.0
"""Rules for shaders that no compiler here enforces: an allow-list of names and attributes, and Lily's own.

``lint(source)`` returns findings as ``file:line: message``.  What it checks, each in a function of its own:

* names: what is called or used must be declared in the source, be a keyword or stand in ALLOWED (msl_names.py); no
  double, no recursion, no exceptions or virtual functions.
* memory orders: relaxed for atomics, seq_cst only in atomic_thread_fence.
* 16-bit integers: never the type of a variable, except a loop's over get_capacity().
* pointers and references of parameters and variables name their address space.
* attributes: known ones, in their places; built-in arguments of matching dimensions; host names unique.
* kernels: those of the kernel table have its buffers, in its order and with its access, then the parameter structure.
* arrays in registers are indexed by constants: literals, constants, and counters of loops with constant bounds.
* cooperative tensors, whose size no compiler knows, are neither fields nor elements of arrays.

Not handled: types (msl_spaces.py), what only running shows (the checked build).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msl_names import ALLOWED, KEYWORDS, MEMBERS
from msl_registers import register_arrays
from msl_survey import Function, Survey, survey

from lily.kernels import KERNELS
from lily.msl.syntax import attributes, closing, without_attributes
from lily.msl.tokens import Token, spelled
from lily.msl.translation import BUILTINS

SPACES = frozenset({"device", "constant", "threadgroup", "thread"})
SHORT = frozenset(
    {"short", "ushort", "int16_t", "uint16_t", "short2", "short3", "short4", "ushort2", "ushort3", "ushort4"}
)


def lint(source: str, metal: int = 320) -> list[str]:
    """All findings in ``source``."""
    s = survey(source, metal)
    rules = (
        names,
        recursion,
        memory_orders,
        short_integers,
        spaces,
        attribute_places,
        kernels,
        register_arrays,
        tensor_variables,
    )
    return [f"{at.file}:{at.line}: {message}" for rule in rules for at, message in rule(s)]


Findings = Iterator[tuple[Token, str]]


# ---- names ----------------------------------------------------------------------------------------------------------


def _declared(tokens: Sequence[Token]) -> set[str]:
    """Identifiers that the source itself introduces: they follow a type, ``*``, ``&``, a comma or a keyword.

    Generous on purpose: a name counts as declared wherever it could be; only unknown functions and types remain.
    """
    found = set()
    for i, t in enumerate(tokens[1:], 1):
        previous = tokens[i - 1]
        if t.kind != "id":
            continue
        following = tokens[i + 1].text if i + 1 < len(tokens) else ""
        after_type = previous.kind == "id" and previous.text not in (
            "return",
            "else",
            "case",
            "operator",
            "new",
            "goto",
        )
        after_type |= previous.text == ")" and following == ";"  # typedef decltype(…) name;
        after_mark = previous.text in ("*", "&", ">", ">>", ",", "]", "{") and following not in ("(", "::", "<", ".")
        if (
            after_type
            or (after_mark and following in ("=", ",", ")", ";", "[", "{", ":", "}"))
            or following in ("=", "[")
        ):
            found.add(t.text)
    return found


def names(s: Survey) -> Findings:
    declared = _declared(s.tokens) | {f.name for f in s.functions} | s.constants
    inside_attribute = 0
    for i, t in enumerate(s.tokens):
        if t.text == "[" and i + 1 < len(s.tokens) and s.tokens[i + 1].text == "[":
            inside_attribute = closing(s.tokens, i)
        if t.kind != "id" or i < inside_attribute:
            continue
        previous = s.tokens[i - 1].text if i else ""
        if previous in (".", "->"):
            known = t.text in MEMBERS or t.text == "template" or t.text in declared or set(t.text) <= set("xyzw")
        else:
            known = t.text in ALLOWED or t.text in declared or (previous == "::" and t.text in MEMBERS)
        if t.text == "double" or t.text in (
            "goto",
            "throw",
            "try",
            "catch",
            "new",
            "delete",
            "virtual",
            "dynamic_cast",
        ):
            yield t, f"{t.text} does not exist in Metal"
        elif not known:
            yield t, f"{t.text} is not in the list of names that Lily's shaders use (tests/support/msl_names.py)"


def recursion(s: Survey) -> Findings:
    """Functions that reach themselves by calls of names; overloads and template arguments of others are told apart."""
    count: dict[str, int] = {}
    calls: dict[str, set[str]] = {}
    for f in s.functions:
        count[f.name] = count.get(f.name, 0) + 1
    for f in s.functions:
        called = set()
        for i, t in enumerate(f.body[:-1]):
            # A member of another object or type is not the function of the same name.
            if t.text in count and f.body[i + 1].text == "(" and f.body[i - 1].text not in (".", "->", "::"):
                called.add(t.text)
        calls.setdefault(f.name, set()).update(called)
    for f in s.functions:
        seen: set[str] = set()
        todo = list(calls[f.name])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += calls.get(name, ())
        if f.name in seen and count[f.name] == 1:
            yield f.head[f.opening - 1], f"{f.name} calls itself; Metal has no recursion"


def memory_orders(s: Survey) -> Findings:
    fences = []
    for i, t in enumerate(s.tokens):
        if t.text == "atomic_thread_fence":
            fences.append((i, closing(s.tokens, i + 1)))
    for i, t in enumerate(s.tokens):
        if not t.text.startswith("memory_order_"):
            continue
        in_fence = any(a < i < b for a, b in fences)
        if in_fence and t.text != "memory_order_seq_cst":
            yield t, f"a fence of {t.text}; Lily's memory model needs memory_order_seq_cst"
        if not in_fence and t.text != "memory_order_relaxed":
            yield t, f"{t.text}: Metal's atomics are memory_order_relaxed"
    for a, b in fences:
        if not any(t.text == "thread_scope_device" for t in s.tokens[a:b]):
            yield s.tokens[a], "a fence names its scope: thread_scope_device"


# ---- types and address spaces ---------------------------------------------------------------------------------------


def short_integers(s: Survey) -> Findings:
    for i, t in enumerate(s.tokens[:-2]):
        name, after = s.tokens[i + 1], s.tokens[i + 2].text
        declares = t.text in SHORT and name.kind == "id" and after in ("=", ";", ",", ")", "[", "{")
        if t.text in SHORT and i + 3 < len(s.tokens) and name.text == "short" and s.tokens[i + 2].kind == "id":
            declares = True
        if not declares or name.text in KEYWORDS:
            continue
        if s.tokens[i - 1].text == "(" and s.tokens[i - 2].text == "for":
            header = s.tokens[i : closing(s.tokens, i - 1)]
            if any(x.text == "get_capacity" for x in header):
                continue
        if after == "[" and s.tokens[i + 3].text != "[":
            continue  # an array of 16-bit data
        yield t, f"{name.text} is a 16-bit integer: 4,096 tokens of 8 experts are 32,768 rows already"


def spaces(s: Survey) -> Findings:
    for f in s.functions:
        for p in f.parameters:
            finding = _without_space(without_attributes(p), parameter=True)
            if finding:
                yield finding
        start = True
        for i, t in enumerate(f.body):
            if start and t.kind == "id" and t.text not in ("return", "case"):
                end = next((k for k in range(i, len(f.body)) if f.body[k].text in ("=", ";", ":", "(", "[")), i)
                finding = _without_space(f.body[i:end], parameter=False) if f.body[end].text in ("=", ":") else None
                if finding:
                    yield finding
            start = t.text in (";", "{", "}")


def _without_space(p: Sequence[Token], parameter: bool) -> tuple[Token, str] | None:
    depth = 0
    for i, t in enumerate(p):
        depth += (t.text == "<") - (t.text == ">") - 2 * (t.text == ">>")
        if t.text in ("*", "&") and depth == 0 and i > 0 and p[i - 1].kind in ("id", "op"):
            words = {x.text for x in p[:i]}
            names = [x for x in p[i:] if x.kind == "id"]
            if parameter or (len([x for x in p[:i] if x.kind == "id"]) >= 1 and len(names) == 1 and p[-1] is names[0]):
                if words & SPACES or "auto" in words:
                    return None
                return t, f"{spelled(p)}: a pointer or reference names its address space"
    return None


def tensor_variables(s: Survey) -> Findings:
    """Types are told by their names: a typedef that mentions a cooperative tensor makes its name one everywhere."""
    types = {t.text for t in _typedefs(s.tokens)}
    scopes: list[bool] = []  # of the open braces: is it a class?
    for i, t in enumerate(s.tokens[:-2]):
        if t.text == "{":
            scopes.append(_opens_class(s.tokens, i))
        elif t.text == "}" and scopes:
            scopes.pop()
        name, after = s.tokens[i + 1], s.tokens[i + 2].text
        if t.text not in types or name.kind != "id" or after not in (";", ",", "[", "="):
            continue
        if after == "[":
            yield t, f"{name.text} is an array of cooperative tensors; Metal has none, name each of them"
        elif scopes and scopes[-1]:
            yield t, f"{name.text} is a field that is a cooperative tensor; make it a variable of the function"


def _typedefs(tokens: Sequence[Token]) -> Iterator[Token]:
    """Names of the typedefs that mention a cooperative tensor."""
    for i, t in enumerate(tokens):
        if t.text == "typedef":
            end = next(k for k in range(i, len(tokens)) if tokens[k].text in (";", "{"))
            if any("cooperative_tensor" in x.text for x in tokens[i:end]):
                yield tokens[end - 1]


def _opens_class(tokens: Sequence[Token], brace: int) -> bool:
    start = next((k for k in range(brace - 1, -1, -1) if tokens[k].text in (";", "{", "}")), -1)
    words = [t.text for t in tokens[start + 1 : brace]]
    return "(" not in words and bool({"struct", "class", "union"} & set(words))


# ---- attributes and kernels -----------------------------------------------------------------------------------------

_POSITIONS = (
    "thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid",
    "threads_per_threadgroup", "threads_per_grid", "threadgroups_per_grid",
)  # fmt: skip
_UNUSED = frozenset({"thread_index_in_quadgroup", "quadgroup_index_in_threadgroup"})  # for sources of others
_SCALARS = frozenset(BUILTINS) - set(_POSITIONS) - _UNUSED
_ON_FUNCTIONS = frozenset({"kernel", "host_name", "max_total_threads_per_threadgroup"})


def attribute_places(s: Survey) -> Findings:
    known = _ON_FUNCTIONS | _SCALARS | set(_POSITIONS) | {"buffer", "threadgroup", "function_constant"}
    for a in attributes(s.tokens):
        if a[0].text not in known:
            yield a[0], f"attribute {a[0].text} is not one that Lily's shaders use"
    seen: dict[str, Token] = {}
    for name in [t.with_text(t.text.strip('"')) for t in s.host_names] + [
        f.head[f.opening - 1] for f in s.functions if f.is_kernel
    ]:
        if name.text in seen:
            yield (
                name,
                f"the kernel name {name.text} is given twice (first at {seen[name.text].file}:{seen[name.text].line})",
            )
        seen[name.text] = name
    for f in s.functions:
        if f.is_kernel:
            yield from _kernel_arguments(f)


def _kernel_arguments(f: Function) -> Findings:
    dimensions: dict[str, int] = {}
    used: dict[str, Token] = {}
    for p in f.parameters:
        own = attributes(p)
        core = without_attributes(p)
        if len(own) != 1:
            yield core[-1], f"argument {core[-1].text} of kernel {f.name} needs one attribute, has {len(own)}"
            continue
        key, kind = own[0][0].text, core[0].text
        if key == "buffer":
            index = spelled(own[0][2:-1])
            if index in used:
                yield core[-1], f"kernel {f.name} has two arguments at buffer({index})"
            used[index] = core[-1]
            if not index.isdigit() or int(index) > 30:
                yield core[-1], f"buffer({index}): an index from 0 to 30"
        elif key in _SCALARS and kind not in ("uint", "ushort"):
            yield core[-1], f"[[{key}]] is a scalar unsigned integer, not {kind}"
        elif key in _SCALARS and kind == "ushort":
            yield core[-1], f"{core[-1].text} is a 16-bit integer"
        elif key in _POSITIONS:
            if kind not in ("uint", "uint2", "uint3"):
                yield core[-1], f"[[{key}]] is uint, uint2 or uint3, not {kind}"
            else:
                dimensions[key] = int(kind[4:] or 1)
    if len(set(dimensions.values())) > 1:
        listed = ", ".join(f"{k}: {v}" for k, v in dimensions.items())
        yield f.head[f.opening - 1], f"positions and sizes of kernel {f.name} differ in dimensions ({listed})"


def kernels(s: Survey) -> Findings:
    """Kernels whose name stands in the kernel table, against their row."""
    for f in s.functions:
        row = KERNELS.get(f.name)
        if not f.is_kernel or row is None or f.head[0].text == "template":
            continue
        at = f.head[f.opening - 1]
        buffers = {}
        for p in f.parameters:
            for a in attributes(p):
                if a[0].text == "buffer" and spelled(a[2:-1]).isdigit():
                    buffers[int(spelled(a[2:-1]))] = without_attributes(p)
        wanted = [a.name for a in row.args] + (["p"] if row.params else [])
        have = [buffers[i][-1].text for i in sorted(buffers)]
        # ``act`` is the type of activations in shaders, so no argument can be called that.
        same = all(h == w or w == "act" for h, w in zip(have, wanted[: len(row.args)], strict=False))
        if sorted(buffers) != list(range(len(wanted))) or not same:
            yield at, f"kernel {f.name} takes the buffers {', '.join(have)}; the kernel table says {', '.join(wanted)}"
            continue
        for i, argument in enumerate(row.args):
            words = {t.text for t in buffers[i]}
            if "device" not in words and "constant" not in words:
                yield at, f"{f.name}: buffer {argument.name} is a device pointer"
            if argument.writes and words & {"const", "constant"}:
                yield at, f"{f.name}: {argument.name} is written (table: {argument.access}) but declared constant"
            if not argument.writes and not words & {"const", "constant"}:
                yield at, f"{f.name}: {argument.name} is only read (table: {argument.access}): declare it const"
        if row.params:
            words = {t.text for t in buffers[len(row.args)]}
            if not {"constant", f"{f.name}_params", "&"} <= words:
                yield at, f"{f.name}: buffer {len(row.args)} is `constant {f.name}_params&`"
