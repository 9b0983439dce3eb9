# SPDX-License-Identifier: Apache-2.0
"""A C preprocessor for shader sources: macros, conditionals, includes; the result is a list of tokens.

``#line`` is obeyed, so that places in a flattened source name the file they were written in.  Standard headers
(``<metal_stdlib>`` …) vanish: whoever compiles the translation brings its own.  ``#pragma unroll`` stays, every other
pragma goes.  Not handled: ``#include_next``, ``__COUNTER__``, ``__has_builtin``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lily.msl.tokens import SourceError, Token, spelled, tokenize

# path of the including file, name, whether in quotes → (path, text), or None for a header that is not ours.
Resolver = Callable[[str, str, bool], "tuple[str, str] | None"]

_KEPT_PRAGMAS = ("unroll", "nounroll", "clang")


@dataclass
class Macro:
    """A macro; ``parameters`` is None for one without parentheses."""

    body: list[Token]
    parameters: list[str] | None = None
    variadic: bool = False


@dataclass(slots=True, eq=False)
class _Painted:
    """A token with the macros that may not expand in it any more."""

    token: Token
    hidden: frozenset[str] = field(default_factory=frozenset)


def metal_defines(version: int) -> dict[str, str]:
    """What Apple's compiler predefines, as far as shaders ask: ``version`` is 320 for MSL 3.2, 400 for MSL 4."""
    common = {"__METAL__": "1", "__METAL_MACOS__": "1", "__METAL_VERSION__": str(version), "__HAVE_BFLOAT__": "1"}
    return common | ({"__HAVE_TENSOR__": "1"} if version >= 400 else {})


def preprocess(
    text: str, file: str = "source.metal", defines: Mapping[str, str] | None = None, resolve: Resolver | None = None
) -> list[Token]:
    """The tokens of ``text`` after preprocessing. SourceError for a directive that is wrong or unknown."""
    p = _Preprocessor(resolve or (lambda *_: None))
    for name, body in (defines or {}).items():
        p.macros[name] = Macro(tokenize(body))
    p.file(text, file)
    return p.out


class _Preprocessor:
    def __init__(self, resolve: Resolver) -> None:
        self.macros: dict[str, Macro] = {}
        self.out: list[Token] = []
        self.resolve = resolve
        self.once: set[str] = set()

    # ---- lines and directives ----
    def file(self, text: str, path: str) -> None:
        tokens = tokenize(text, path)
        conditions: list[tuple[bool, bool, bool]] = []  # (this branch is on, one was taken, the outside is on)
        pending: list[Token] = []
        i, shift, name = 0, 0, path
        while i < len(tokens):
            t = tokens[i]
            if not (t.first and t.text == "#"):
                if all(c[0] for c in conditions):
                    t.line, t.file = t.line + shift, name
                    pending.append(t)
                i += 1
                continue
            end = i + 1
            while end < len(tokens) and not tokens[end].first:
                end += 1
            line = tokens[i + 1 : end]
            i = end
            if not line:
                continue
            directive, rest = line[0].text, line[1:]
            if self.conditional(directive, rest, conditions, t):
                continue
            if not all(c[0] for c in conditions):
                continue
            if directive == "line":
                shift, name = int(rest[0].text) - t.line - 1, rest[1].text[1:-1] if len(rest) > 1 else name
                continue
            if directive in ("define", "undef", "include", "pragma"):
                self.flush(pending)
            t.line, t.file = t.line + shift, name
            self.plain(directive, rest, t, path)
        if conditions:
            raise SourceError(f"{path}: #if without #endif")
        self.flush(pending)

    def flush(self, pending: list[Token]) -> None:
        """Expands what has gathered, and makes pragmas of the operator _Pragma("…")."""
        tokens = self.expand(pending)
        pending.clear()
        i = 0
        while i < len(tokens):
            t = tokens[i]
            if t.text == "_Pragma" and t.kind == "id" and i + 3 < len(tokens):
                text = tokens[i + 2].text[1:-1].replace('\\"', '"')
                self.pragma(tokenize(text), t)
                i += 4
            else:
                self.out.append(t)
                i += 1

    def pragma(self, words: list[Token], at: Token) -> None:
        if words and words[0].text in _KEPT_PRAGMAS:
            self.out.append(Token("pragma", "#pragma " + spelled(words), at.file, at.line, first=True))

    def conditional(self, directive: str, rest: list[Token], stack: list[tuple[bool, bool, bool]], at: Token) -> bool:
        outside = all(c[0] for c in stack)
        if directive in ("if", "ifdef", "ifndef"):
            if directive == "if":
                on = outside and self.condition(rest, at)
            else:
                on = outside and (rest[0].text in self.macros) == (directive == "ifdef")
            stack.append((on, on, outside))
        elif directive in ("elif", "else", "endif"):
            if not stack:
                raise SourceError(f"#{directive} without #if", at)
            _, taken, outside = stack.pop()
            if directive == "elif":
                on = outside and not taken and self.condition(rest, at)
                stack.append((on, taken or on, outside))
            elif directive == "else":
                stack.append((outside and not taken, True, outside))
        else:
            return False
        return True

    def plain(self, directive: str, rest: list[Token], at: Token, path: str) -> None:
        if directive == "define":
            self.define(rest, at)
        elif directive == "undef":
            self.macros.pop(rest[0].text, None)
        elif directive == "include":
            quoted = rest[0].kind == "str"
            name = rest[0].text[1:-1] if quoted else spelled(rest).strip("<> ")
            found = self.resolve(path, name, quoted)
            if found is None and quoted:
                raise SourceError(f"included file {name!r} not found", at)
            if found and found[0] not in self.once:
                self.file(found[1], found[0])
        elif directive == "pragma":
            if rest and rest[0].text == "once":
                self.once.add(path)
            else:
                self.pragma(rest, at)
        elif directive == "error":
            raise SourceError("#error " + spelled(rest), at)
        elif directive != "warning":
            raise SourceError(f"unknown directive #{directive}", at)

    def define(self, line: list[Token], at: Token) -> None:
        if not line or line[0].kind != "id":
            raise SourceError("#define without a name", at)
        name, body = line[0].text, line[1:]
        if not body or body[0].text != "(" or body[0].space:
            self.macros[name] = Macro(body)
            return
        parameters, k = [], 1
        while body[k].text != ")":
            if body[k].text != ",":
                parameters.append(body[k].text)
            k += 1
        variadic = bool(parameters) and parameters[-1] == "..."
        if variadic:
            parameters[-1] = "__VA_ARGS__"
        self.macros[name] = Macro(body[k + 1 :], parameters, variadic)

    # ---- expansion ----
    def expand(self, tokens: list[Token]) -> list[Token]:
        return [p.token for p in self._expand([_Painted(t) for t in tokens])]

    def _expand(self, work: list[_Painted]) -> list[_Painted]:
        out: list[_Painted] = []
        work = work[::-1]
        while work:
            item = work.pop()
            t = item.token
            macro = self.macros.get(t.text) if t.kind == "id" else None
            if t.text in ("__LINE__", "__FILE__") and t.kind == "id":
                out.append(_Painted(t.with_text(str(t.line) if t.text == "__LINE__" else f'"{t.file}"', "num")))
            elif macro is None or t.text in item.hidden:
                out.append(item)
            elif macro.parameters is None:
                work.extend(self._body(macro, {}, item, item.hidden | {t.text})[::-1])
            elif work and work[-1].token.text == "(":
                arguments, closing = self._arguments(work, t)
                bound = self._bind(macro, arguments, t)
                hidden = (item.hidden & closing.hidden) | {t.text}
                work.extend(self._body(macro, bound, item, hidden)[::-1])
            else:
                out.append(item)
        return out

    def _arguments(self, work: list[_Painted], at: Token) -> tuple[list[list[_Painted]], _Painted]:
        work.pop()
        depth, arguments = 1, [[]]  # type: tuple[int, list[list[_Painted]]]
        while work:
            item = work.pop()
            text = item.token.text
            depth += (text in "([{" and item.token.kind == "op") - (text in ")]}" and item.token.kind == "op")
            if depth == 0:
                return arguments, item
            if text == "," and depth == 1:
                arguments.append([])
            else:
                arguments[-1].append(item)
        raise SourceError(f"call of macro {at.text} does not end", at)

    def _bind(self, macro: Macro, arguments: list[list[_Painted]], at: Token) -> dict[str, list[_Painted]]:
        names = macro.parameters or []
        if macro.variadic and len(arguments) >= len(names):
            last = arguments[len(names) - 1]
            for more in arguments[len(names) :]:
                last = [*last, _Painted(Token("op", ",", at.file, at.line)), *more]
            arguments = [*arguments[: len(names) - 1], last]
        if macro.variadic and len(arguments) == len(names) - 1:
            arguments = [*arguments, []]
        if len(arguments) != len(names) and not (not names and arguments == [[]]):
            raise SourceError(f"macro {at.text} takes {len(names)} arguments, got {len(arguments)}", at)
        return dict(zip(names, arguments, strict=False))

    def _body(
        self, macro: Macro, bound: dict[str, list[_Painted]], at: _Painted, hidden: frozenset[str]
    ) -> list[_Painted]:
        """The macro's replacement with arguments in place, before it is scanned again."""
        out: list[_Painted] = []
        body, i, place = macro.body, 0, at.token
        while i < len(body):
            t = body[i]
            following = body[i + 1].text if i + 1 < len(body) else ""
            if t.text == "#" and macro.parameters is not None and following in bound:
                text = spelled(p.token for p in bound[following]).replace("\\", "\\\\").replace('"', '\\"')
                out.append(_Painted(Token("str", f'"{text}"', space=t.space)))
                i += 2
            elif t.text == "##" and out and i + 1 < len(body):
                right = [*bound[following]] if following in bound else [_Painted(body[i + 1])]
                if right:
                    glued = out.pop().token.text + right[0].token.text
                    out.extend(_Painted(x) for x in tokenize(glued))
                    out.extend(right[1:])
                i += 2
            elif t.text in bound:
                raw = bound[t.text]
                new = list(raw) if following == "##" else self._expand(list(raw))
                if new:
                    new[0] = _Painted(new[0].token.with_text(new[0].token.text), new[0].hidden)
                    new[0].token.space = t.space
                elif following == "##":
                    new = [_Painted(Token("op", ""))]
                out.extend(new)
                i += 1
            else:
                out.append(_Painted(t))
                i += 1
        result = []
        for n, p in enumerate(x for x in out if x.token.text):
            token = p.token.with_text(p.token.text)
            token.file, token.line, token.first = place.file, place.line, False
            if n == 0:
                token.space, token.first = place.space, place.first
            result.append(_Painted(token, p.hidden | hidden))
        return result

    # ---- #if ----
    def condition(self, tokens: list[Token], at: Token) -> bool:
        plain: list[Token] = []
        i = 0
        while i < len(tokens):
            t = tokens[i]
            if t.text == "defined":
                parenthesised = tokens[i + 1].text == "("
                name = tokens[i + (2 if parenthesised else 1)].text
                plain.append(t.with_text(str(int(name in self.macros)), "num"))
                i += 4 if parenthesised else 2
            elif t.text in ("__has_include", "__has_feature", "__has_attribute", "__has_builtin", "__has_extension"):
                depth, i = 0, i + 1
                while True:
                    depth += (tokens[i].text == "(") - (tokens[i].text == ")")
                    i += 1
                    if depth == 0:
                        break
                plain.append(t.with_text("0", "num"))
            else:
                plain.append(t)
                i += 1
        return _Expression(self.expand(plain), at).value() != 0


_DIVISIONS: dict[str, Callable[[int, int], int]] = {"/": operator.floordiv, "%": operator.mod}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: a != 0 or b != 0,
    "&&": lambda a, b: a != 0 and b != 0,
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class _Expression:
    """Integer constant expressions by precedence climbing; identifiers that no macro defines are 0."""

    LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
              ("*", "/", "%"))  # fmt: skip

    def __init__(self, tokens: list[Token], at: Token) -> None:
        self.tokens, self.i, self.at = tokens, 0, at

    def value(self) -> int:
        result = self.ternary()
        if self.i != len(self.tokens):
            raise SourceError(f"#if: cannot read {spelled(self.tokens)!r}", self.at)
        return result

    def peek(self) -> str:
        return self.tokens[self.i].text if self.i < len(self.tokens) else ""

    def ternary(self) -> int:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.i += 1
        yes = self.ternary()
        self.i += 1
        no = self.ternary()
        return yes if condition else no

    def binary(self, level: int) -> int:
        if level == len(self.LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in self.LEVELS[level]:
            op = self.peek()
            self.i += 1
            left = self.apply(op, left, self.binary(level + 1))
        return left

    def apply(self, op: str, a: int, b: int) -> int:
        if op in ("/", "%"):
            return 0 if b == 0 else _DIVISIONS[op](a, b)
        return int(_OPERATORS[op](a, b))

    def unary(self) -> int:
        if self.i >= len(self.tokens):
            raise SourceError("#if: the expression ends early", self.at)
        t = self.tokens[self.i]
        self.i += 1
        if t.text == "(":
            result = self.ternary()
            self.i += 1
            return result
        if t.text in ("!", "-", "+", "~"):
            v = self.unary()
            return {"!": int(v == 0), "-": -v, "+": v, "~": ~v}[t.text]
        if t.kind == "num":
            return int(t.text.rstrip("uUlL"), 0)
        if t.kind == "id":
            if self.peek() == "(":
                raise SourceError(f"#if: unknown function {t.text}", self.at)
            return int(t.text == "true")
        raise SourceError(f"#if: cannot read {t.text!r}", self.at)
