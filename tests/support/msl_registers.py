# SPDX-License-Identifier: Apache-2.0
"""The rule that arrays in registers are indexed by what the compiler knows, or they end up in memory.

Allowed are literals, constants, template arguments, and counters of loops whose bounds are such; an index that is a
function's parameter must be one of these at every call.  Not handled: arrays behind typedefs, members of other objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from msl_names import ALLOWED
from msl_survey import Function, Survey

from lily.msl.syntax import closing, closing_angle, split_commas
from lily.msl.tokens import Token, spelled

Findings = Iterator[tuple[Token, str]]


def register_arrays(s: Survey) -> Findings:
    needs: dict[tuple[str, int], Token] = {}  # (function, parameter) → where it indexes an array
    calls = {t.text for f in s.functions for t in f.body}
    looked = [_Registers(f, s.constants, f.name in calls) for f in s.functions]
    for r in looked:
        yield from r.check(needs)
    for (name, position), used in needs.items():
        for r in looked:
            for call, argument in r.calls(name, position):
                bad = r.variable(*argument)
                if bad:
                    yield (
                        call,
                        f"{name} indexes an array by its argument {position + 1} ({used.file}:{used.line}); "
                        f"{bad} is no constant",
                    )


class _Registers:
    """Private arrays of one function and the counters that may index them."""

    def __init__(self, f: Function, constants: set[str], called: bool) -> None:
        self.f, self.body, self.called = f, f.body, called
        self.constant = set(constants) | f.constants | set(self._template_names()) | {"sizeof", "true", "false"}
        self.arrays = set(self._parameter_arrays()) | f.arrays
        self.counters: list[tuple[str, int, int]] = []  # name, from, to (indices in body)

    def _template_names(self) -> Iterator[str]:
        """Value parameters of the function's own template list."""
        for t in self.f.head[: self.f.opening]:
            if t.kind == "id":
                yield t.text

    def _parameter_arrays(self) -> Iterator[str]:
        for p in self.f.parameters:
            words = [t.text for t in p]
            if "thread" in words and "[" in words and "&" in words:
                yield words[words.index("&") + 1]

    def check(self, needs: dict[tuple[str, int], Token]) -> Findings:
        self._declarations()
        self._loops()
        values = {p[-1].text: n for n, p in enumerate(self.f.parameters) if not {"*", "&", "]"} & {t.text for t in p}}
        if self.f.is_kernel or not self.called:
            values = {}
        for i, t in enumerate(self.body[:-1]):
            if t.text not in self.arrays or self.body[i - 1].text in (".", "->", "::") or i in self.declared:
                continue
            k = i + 1
            while k < len(self.body) and self.body[k].text == "[":
                end = closing(self.body, k)
                bad = self.variable(k + 1, end)
                if bad in values:
                    needs[self.f.name, values[bad]] = t  # a constant if all callers give one
                elif bad:
                    index = spelled(self.body[k + 1 : end])
                    yield t, f"{t.text}[{index}]: {bad} is no constant, so the array leaves registers"
                k = end + 1

    def calls(self, name: str, position: int) -> Iterator[tuple[Token, tuple[int, int]]]:
        """Calls of ``name`` with the range of one argument."""
        for i, t in enumerate(self.body[:-1]):
            if t.text != name:
                continue
            k = closing_angle(self.body, i + 1) + 1 if self.body[i + 1].text == "<" else i + 1
            if self.body[k].text != "(":
                continue
            begin, depth, arguments = k + 1, 0, []
            for j in range(k + 1, closing(self.body, k) + 1):
                text = self.body[j].text
                if depth == 0 and (text == "," or j == closing(self.body, k)):
                    arguments.append((begin, j))
                    begin = j + 1
                depth += (text in "([{") - (text in ")]}") if self.body[j].kind == "op" else 0
            if position < len(arguments):
                yield t, arguments[position]

    def _declarations(self) -> None:
        self.declared: set[int] = set()
        start = 0
        for i, t in enumerate(self.body):
            if t.text in ("=", ";") and start < i:
                self._declaration(start, i)
            if t.text in (";", "{", "}") or (t.text == ")" and self.body[i + 1].text not in (";", ",", ")")):
                start = i + 1

    def _declaration(self, start: int, end: int) -> None:
        words = [t.text for t in self.body[start:end]]
        if "constexpr" in words or ("constant" in words and "*" not in words):
            name = next((k for k, w in enumerate(words) if w == "["), len(words)) - 1
            self.constant.add(words[name])
            return
        if "threadgroup" in words or "[" not in words:
            return
        at = start
        for n, part in enumerate(split_commas(self.body[start:end])):
            bracket = next((k for k, t in enumerate(part) if t.text == "["), 0)
            # TYPE NAME [ … : two identifiers, or a template list and one, stand before the first bracket.
            typed = n > 0 or (bracket >= 2 and (part[bracket - 2].kind == "id" or part[bracket - 2].text == ">"))
            if bracket and typed and part[bracket - 1].kind == "id" and part[0].text not in ("return", "else"):
                self.arrays.add(part[bracket - 1].text)
                self.declared.add(at + bracket - 1)
            elif n == 0:
                return
            at += len(part) + 1

    def _loops(self) -> None:
        for i, t in enumerate(self.body):
            if t.text != "for":
                continue
            end = closing(self.body, i + 1)
            parts: list[list[Token]] = [[]]
            for x in self.body[i + 2 : end]:
                if x.text == ";":
                    parts.append([])
                else:
                    parts[-1].append(x)
            if len(parts) != 3 or not parts[0]:
                continue
            last = self._body_end(end + 1)
            name = next((parts[0][k - 1].text for k, x in enumerate(parts[0]) if x.text == "=" and k), None)
            known = self._known_at(i)
            fixed = all(
                x.kind != "id" or x.text == name or x.text in known or x.text in ("uint", "int", "const", "bool")
                # A cooperative tensor's capacity is known to the compiler.
                for part in (parts[0], parts[2], [] if any(y.text == "get_capacity" for y in parts[1]) else parts[1])
                for x in part
            )
            if name and fixed:
                self.counters.append((name, i, last))

    def _body_end(self, k: int) -> int:
        """Index behind the statement at ``k``."""
        text = self.body[k].text
        if self.body[k].kind == "pragma":
            return self._body_end(k + 1)
        if text == "{":
            return closing(self.body, k)
        if text in ("for", "if", "while"):
            end = self._body_end(closing(self.body, k + 1) + 1)
            if text == "if" and end + 1 < len(self.body) and self.body[end + 1].text == "else":
                return self._body_end(end + 2)
            return end
        while self.body[k].text != ";":
            k = closing(self.body, k) + 1 if self.body[k].text in ("(", "[", "{") else k + 1
        return k

    def _known_at(self, i: int) -> set[str]:
        return self.constant | {name for name, a, b in self.counters if a < i <= b}

    def variable(self, a: int, b: int) -> str | None:
        """The first name in body[a:b] that is no constant there."""
        known = self._known_at(a)
        for i in range(a, b):
            t = self.body[i]
            if t.kind == "id" and t.text not in known and t.text not in ALLOWED and self.body[i - 1].text != "::":
                return t.text
        return None
