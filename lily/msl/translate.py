# SPDX-License-Identifier: Apache-2.0
"""Metal Shading Language to C++: the rewriting that hosts and CUDA share.

Preprocessed tokens in, tokens that a C++20 compiler understands out.  Address spaces vanish (``coherent`` becomes
``volatile``, so that it can still be seen), attributes go, function constants get the values of macros,
threadgroup variables refer to the group's memory, swizzles become member templates, literals get the type they
have in Metal.  Kernels and their arguments are collected for the entry points (host.py, cuda.py).

Function constants stay no constant expressions, as in Metal.
Not handled: vertex and fragment functions, textures, ray tracing, ``.r/.g/.b/.a`` on single components, threadgroup
variables whose address space follows their type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lily.msl.rewrites import declared_names, kernel_argument, literal, swizzle
from lily.msl.syntax import (
    CLOSE,
    OPEN,
    attributes,
    closing,
    closing_angle,
    is_attribute,
    split_commas,
    without_attributes,
)
from lily.msl.tokens import SourceError, Token, spelled, tokenize
from lily.msl.translation import Chunk, Entry, Translation

_DROPPED = frozenset({"device", "thread", "threadgroup", "ray_data", "kernel"})
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})


@dataclass(frozen=True)
class Options:
    """``target`` is host or cuda. ``coverage``: mark every statement."""

    target: str = "host"
    coverage: bool = False


def translate(tokens: Sequence[Token], options: Options | None = None) -> Translation:
    """C++ tokens for preprocessed ``tokens``. SourceError for what the translator does not understand."""
    t = Translator(list(tokens), options or Options())
    i = 0
    while i < len(t.toks):
        t.names = set()
        i = t.declaration(i, len(t.toks), in_class=False)
        t.result.chunks.append(Chunk(t.out, frozenset(t.names)))
        t.out = []
    t.resolve_instances()
    return t.result


@dataclass(frozen=True)
class _Instance:
    base: str
    function: str
    host_name: str
    at: Token


class Translator:
    def __init__(self, toks: list[Token], options: Options) -> None:
        self.toks, self.options = toks, options
        self.result = Translation()
        self.out: list[Token] = []  # of the current declaration
        self.names: set[str] = set()  # that it declares
        self.kernels: dict[str, Entry] = {}
        self.templates: set[str] = set()
        self.instances: list[_Instance] = []
        self.marking = False

    # ---- output ----
    def emit(self, text: str, at: Token) -> None:
        for t in tokenize(text):
            t.file, t.line, t.first = at.file, at.line, False
            self.out.append(t)

    def copy(self, start: int, end: int) -> None:
        """Rewrites toks[start:end] token by token into the output."""
        self.out += self.rewritten(self.toks[start:end])

    def rewritten(self, toks: list[Token]) -> list[Token]:
        out: list[Token] = []
        i = 0
        while i < len(toks):
            t = toks[i]
            following = toks[i + 1].text if i + 1 < len(toks) else ""
            if is_attribute(toks, i):
                i = closing(toks, i) + 1
                continue
            if t.kind == "num":
                t = t.with_text(literal(t.text))
            elif t.kind == "id":
                previous = toks[i - 1].text if i else ""
                if t.text in _DROPPED:
                    i += 1
                    continue
                if t.text == "coherent":
                    t = t.with_text("volatile")
                    if following == "(":
                        i = closing(toks, i + 1)
                elif t.text == "constant":
                    t = t.with_text("const")
                elif previous in (".", "->") and following != "(" and _SWIZZLE.fullmatch(t.text):
                    t = t.with_text(swizzle(t.text, following in _ASSIGNMENTS))
                elif t.text == "is_function_constant_defined":
                    t = t.with_text("MSL_IS_DEFINED_" + toks[i + 2].text)
                    i = closing(toks, i + 1)
            out.append(t)
            i += 1
        return out

    # ---- declarations ----
    def scope(self, i: int, end: int, in_class: bool = False) -> None:
        """Declarations of a namespace or class between ``i`` and ``end``."""
        while i < end:
            i = self.declaration(i, end, in_class)

    def declaration(self, i: int, end: int, in_class: bool) -> int:
        toks, t = self.toks, self.toks[i]
        if t.kind == "pragma" or t.text == ";":
            self.copy(i, i + 1)
            return i + 1
        if in_class and t.text in ("public", "private", "protected"):
            self.copy(i, i + 2)
            return i + 2
        if t.text == "template" and toks[i + 1].text != "<":
            return self.instantiation(i)
        stop = self.head_end(i, end)
        head = toks[i:stop]
        words = {x.text for x in head}
        if toks[stop].text == ";":
            self.simple_declaration(head, in_class)
            return stop + 1
        if "namespace" in words or t.text == "extern":
            self.copy(i, stop + 1)
            last = closing(toks, stop)
            self.scope(stop + 1, last)
            self.copy(last, last + 1)
            self.names = set()
            return last + 1
        kind = self.class_key(head)
        if kind:
            if not in_class:
                self.names |= {x.text for x in head if x.kind == "id"} - {
                    "struct",
                    "class",
                    "union",
                    "enum",
                    "template",
                }
            return self.class_definition(i, stop, kind)
        if self.parameter_list(head) is not None and not self.initialised(head):
            return self.function(i, stop, in_class)
        last = self.statement_end(stop)  # T x = {...}; or T x{...};
        self.simple_declaration(toks[i:last], in_class)
        return last + 1

    def head_end(self, i: int, end: int) -> int:
        """Index of the ``;`` or ``{`` that ends the head of the declaration at ``i``."""
        k = i
        while k < end:
            text = self.toks[k].text
            if text in (";", "{"):
                return k
            k = closing(self.toks, k) + 1 if text in OPEN else k + 1
        raise SourceError("declaration does not end", self.toks[i])

    def statement_end(self, k: int) -> int:
        while self.toks[k].text != ";":
            k = closing(self.toks, k) + 1 if self.toks[k].text in OPEN else k + 1
        return k

    @staticmethod
    def after_template(head: Sequence[Token]) -> int:
        """Index behind all leading ``template <...>`` and requires-less heads."""
        i = 0
        while i < len(head) and head[i].text == "template":
            i = closing_angle(head, i + 1) + 1
        return i

    def class_key(self, head: list[Token]) -> str:
        """``struct``, ``class``, ``union`` or ``enum`` if that is what the head declares, else nothing."""
        rest = without_attributes(head[self.after_template(head) :])
        key, k = "", 0
        while k < len(rest) and rest[k].text != "=":
            text = rest[k].text
            if text in ("struct", "class", "union", "enum"):
                key = key or text
            elif text in ("alignas", "__attribute__"):
                k = closing(rest, k + 1)
            elif text == ":" and key:
                return key
            elif text == "(":
                return ""  # a function that returns one
            k += 1
        return key

    @staticmethod
    def initialised(head: Sequence[Token]) -> bool:
        """Whether ``=`` stands at the head's outer level: a variable whatever else it looks like."""
        depth = 0
        for k, t in enumerate(head):
            depth += (t.text in OPEN or t.text == "<") - (t.text in CLOSE or t.text == ">") - 2 * (t.text == ">>")
            if t.text == "=" and depth == 0 and (k == 0 or head[k - 1].text != "operator"):
                return True
        return False

    def parameter_list(self, head: Sequence[Token]) -> int | None:
        """Index in ``head`` of the ``(`` of a function's parameters, None if it declares no function."""
        i = self.after_template(head)
        while i < len(head):
            text = head[i].text
            if text == "operator":
                i += 1
                while head[i].text != "(" or (head[i - 1].text == "operator" and head[i + 1].text == ")"):
                    i += 1 if head[i].text != "(" else 2
                return i
            if text in ("alignas", "__attribute__", "decltype"):
                i = closing(head, i + 1) + 1
                continue
            if text == "[":
                i = closing(head, i) + 1
                continue
            if text == "(":
                return i
            if text == "<" and i and head[i - 1].kind == "id":
                i = closing_angle(head, i)
            i += 1
        return None

    def simple_declaration(self, head: list[Token], in_class: bool) -> None:
        at = head[0]
        if not in_class:
            self.names |= declared_names(head)
        for a in attributes(head):
            if a[0].text == "function_constant":
                self.function_constant(head, spelled(a[2:-1]))
                return
        is_prototype = self.parameter_list(head) is not None and not self.initialised(head)
        declares_type = head[0].text in ("using", "typedef", "static_assert", "friend", "struct", "class", "enum")
        out = self.rewritten(head)
        if self.options.target == "cuda" and not declares_type:
            if is_prototype:
                self.mark_device(out)
            elif not in_class and not any(t.text == "constexpr" for t in out):
                out.insert(0, Token("id", "MSL_CONSTANT", at.file, at.line, space=True))
        if is_prototype and not in_class and not declares_type and self.is_free(head):
            self.internal(out)
        self.out += out
        self.emit(";", at)

    def function_constant(self, head: list[Token], index: str) -> None:
        """The value comes from the macro MSL_VALUE_name; without it, reading the constant fails at link time."""
        plain = without_attributes(head)
        name, at = plain[-1].text, head[0]
        kind = spelled(t for t in plain[:-1] if t.text not in ("constant", "static", "const"))
        self.result.constants[name] = index
        self.names = {name, "MSL_IS_DEFINED_" + name}
        for line in (
            f"#ifdef MSL_VALUE_{name}",
            f"#define MSL_IS_DEFINED_{name} true",
            f"MSL_DEFINE_CONSTANT({kind}, {name}, MSL_VALUE_{name});",
            "#else",
            f"#define MSL_IS_DEFINED_{name} false",
            f"MSL_UNDEFINED_CONSTANT({kind}, {name});",
            "#endif",
        ):
            self.out.append(Token("pragma", line, at.file, at.line, first=True))

    def class_definition(self, i: int, stop: int, kind: str) -> int:
        self.copy(i, stop + 1)
        last = closing(self.toks, stop)
        if kind == "enum":
            self.names |= {x.text for x in self.toks[stop:last] if x.kind == "id"}
            self.copy(stop + 1, last)
        else:
            self.scope(stop + 1, last, in_class=True)
        end = self.statement_end(last + 1)
        self.copy(last, end + 1)
        return end + 1

    def instantiation(self, i: int) -> int:
        """``template [[host_name("n")]] kernel void f<args>(…);`` names a kernel; other instantiations stay out."""
        end = self.statement_end(i)
        toks = self.toks[i + 1 : end]
        host = next((a[2].text[1:-1] for a in attributes(toks) if a[0].text == "host_name"), "")
        plain = without_attributes(toks)
        if plain and plain[-1].text == ")":  # the parameter list
            depth, k = 0, len(plain) - 1
            while True:
                depth += (plain[k].text == ")") - (plain[k].text == "(")
                if depth == 0:
                    break
                k -= 1
            plain = plain[:k]
        if plain and plain[-1].text in (">", ">>"):
            depth, k = 0, len(plain) - 1
            while k >= 0:
                depth += (plain[k].text == ">") + 2 * (plain[k].text == ">>") - (plain[k].text == "<")
                if depth <= 0:
                    break
                k -= 1
            name = k - 1
            while name >= 2 and plain[name - 1].text == "::":
                name -= 2
            function = spelled(self.rewritten(plain[name:]))
            self.instances.append(_Instance(plain[k - 1].text, function, host or function, self.toks[i]))
        return end + 1

    def resolve_instances(self) -> None:
        for inst in self.instances:
            base = self.kernels.get(inst.base)
            if base:
                self.result.entries.append(
                    Entry(inst.host_name, inst.function, base.arguments, base.max_threads, inst.at.file, inst.at.line)
                )
        self.result.entries += [k for name, k in self.kernels.items() if name not in self.templates]

    # ---- functions ----
    def is_free(self, head: Sequence[Token]) -> bool:
        opening = self.parameter_list(head)
        return opening is not None and opening >= 2 and head[opening - 2].text != "::"

    def internal(self, out: list[Token]) -> None:
        """Gives a free function internal linkage, so that what no kernel uses costs nothing."""
        words = {t.text for t in out}
        if words.isdisjoint({"static", "inline", "constexpr", "template", "METAL_FUNC", "extern", "friend"}):
            out.insert(0, out[0].with_text("static", "id"))

    def mark_device(self, out: list[Token]) -> None:
        k = self.after_template(out)
        if k < len(out):
            out.insert(k, Token("id", "MSL_DEVICE", out[k].file, out[k].line, space=True))

    def function(self, i: int, stop: int, in_class: bool) -> int:
        head = self.toks[i:stop]
        is_kernel = any(t.text == "kernel" for t in head) or any(a[0].text == "kernel" for a in attributes(head))
        opening = self.parameter_list(head)
        assert opening is not None
        if is_kernel:
            self.kernel(head, opening)
        if not in_class and head[opening - 1].kind == "id":
            self.names.add(head[opening - 1].text)
        out = self.rewritten(head)
        if not in_class and self.is_free(head):
            self.internal(out)
        if self.options.target == "cuda":
            self.mark_device(out)
        self.out += out
        self.marking = self.options.coverage and not any(t.text == "constexpr" for t in head)
        last = closing(self.toks, stop)
        self.compound(stop)
        return last + 1

    def kernel(self, head: list[Token], opening: int) -> None:
        name = head[opening - 1]
        parameters = split_commas(head[opening + 1 : closing(head, opening)])
        arguments, free = [], 0
        for p in parameters:
            argument = kernel_argument(p, free)
            if argument.kind == "BUFFER":
                free = int(argument.index) + 1 if argument.index.isdigit() else free + 1
            arguments.append(argument)
        limit = next(
            (spelled(a[2:-1]) for a in attributes(head) if a[0].text == "max_total_threads_per_threadgroup"), "0"
        )
        if name.text in self.kernels:
            raise SourceError(f"kernel {name.text} is defined twice", name)
        host = next((a[2].text[1:-1] for a in attributes(head) if a[0].text == "host_name"), name.text)
        self.kernels[name.text] = Entry(host, name.text, tuple(arguments), limit, name.file, name.line)
        if head[0].text == "template":
            self.templates.add(name.text)

    # ---- statements ----
    def compound(self, i: int) -> int:
        last = closing(self.toks, i)
        self.copy(i, i + 1)
        i += 1
        while i < last:
            i = self.statement(i)
        self.copy(last, last + 1)
        return last + 1

    def mark(self, at: Token) -> None:
        if self.marking:
            self.out.append(Token("mark", "", at.file, at.line))

    def statement(self, i: int) -> int:
        """Rewrites the statement at ``i``; returns the index behind it."""
        toks = self.toks
        while toks[i].kind == "pragma":
            # A pragma belongs to the loop behind it: no mark in between.
            self.mark(toks[i])
            while toks[i].kind == "pragma":
                self.copy(i, i + 1)
                i += 1
            return self.unmarked(i)
        if toks[i].text in ("case", "default"):
            while toks[i].text != ":":
                self.copy(i, i + 1)
                i += 1
            self.copy(i, i + 1)
            return i + 1
        if toks[i].text not in ("{", ";"):
            self.mark(toks[i])
        return self.unmarked(i)

    def unmarked(self, i: int) -> int:
        toks, text = self.toks, self.toks[i].text
        if text == "{":
            return self.compound(i)
        if text in ("if", "for", "while", "switch"):
            start = i
            i += 2 if toks[i + 1].text == "constexpr" else 1
            end = closing(toks, i)
            self.copy(start, end + 1)
            i = self.body(end + 1)
            if text == "if" and i < len(toks) and toks[i].text == "else":
                self.copy(i, i + 1)
                i = self.body(i + 1)
            return i
        if text == "do":
            self.copy(i, i + 1)
            i = self.body(i + 1)
            end = self.statement_end(i)
            self.copy(i, end + 1)
            return end + 1
        end = self.statement_end(i)
        if self.threadgroup_variable(i, end):
            return end + 1
        self.copy(i, end + 1)
        return end + 1

    def body(self, i: int) -> int:
        """The statement governed by a control keyword, in braces of its own."""
        at = self.toks[i]
        if at.text == "{" or (at.text == "if" and self.toks[i - 1].text == "else" and not self.marking):
            return self.unmarked(i)
        self.emit("{", at)
        i = self.statement(i)
        self.emit("}", at)
        return i

    def threadgroup_variable(self, i: int, end: int) -> bool:
        """Turns ``threadgroup T a[N], b;`` into references to the group's memory; False for another statement."""
        stmt = without_attributes(self.toks[i:end])
        alignment = "16"
        k = 0
        while k < len(stmt) and stmt[k].text in ("alignas", "static", "const", "volatile"):
            if stmt[k].text == "alignas":
                last = closing(stmt, k + 1)
                alignment = spelled(stmt[k + 2 : last])
                k = last
            k += 1
        if k >= len(stmt) or stmt[k].text != "threadgroup":
            return False
        rest = stmt[k + 1 :]
        if rest and rest[0].text == "alignas":
            last = closing(rest, 1)
            alignment, rest = spelled(rest[2:last]), rest[last + 1 :]
        parts = split_commas(rest)
        first = parts[0]
        bound = next((n for n, t in enumerate(first) if t.text in ("[", "=")), len(first))
        if any(t.text in ("*", "&", "(") for t in first[:bound]):
            return False
        if bound < len(first) and first[bound].text == "=":
            raise SourceError("a threadgroup variable cannot be initialised", first[bound])
        kind = spelled(self.rewritten(first[: bound - 1]))
        for n, part in enumerate(parts):
            name, extent = (first[bound - 1], first[bound:]) if n == 0 else (part[0], part[1:])
            self.emit(
                f"typedef {kind} msl_type_of_{name.text}{spelled(self.rewritten(extent))}; "
                f"MSL_THREADGROUP(msl_type_of_{name.text}, {name.text}, {alignment});",
                name,
            )
        return True
