# SPDX-License-Identifier: Apache-2.0
"""The small rewritings and readings of the translator: literals, swizzles, kernel arguments, declared names."""

from __future__ import annotations

import re

from lily.msl.syntax import attributes, split_commas, without_attributes
from lily.msl.tokens import SourceError, Token, spelled
from lily.msl.translation import BUILTINS, Argument

_FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


def declared_names(head: list[Token]) -> set[str]:
    """Names that a declaration without a body introduces; none for using namespace and static_assert."""
    words = [t for t in without_attributes(head) if t.kind in ("id", "op", "num")]
    if words[0].text == "static_assert" or (words[0].text == "using" and words[1].text == "namespace"):
        return set()
    if words[0].text == "using":
        return {words[1].text}
    if words[0].text == "template" and any(t.text == "using" for t in words):
        at = next(i for i, t in enumerate(words) if t.text == "using")
        return {words[at + 1].text}
    found = set()
    for part in split_commas(words):
        stop = next((i for i, t in enumerate(part) if t.text in ("=", "[", "(", "{")), len(part))
        if stop and part[stop - 1].kind == "id":
            found.add(part[stop - 1].text)
    return found


def kernel_argument(p: list[Token], free: int) -> Argument:
    """What a kernel's parameter ``p`` binds to; ``free`` is the first unused buffer index."""
    core = without_attributes(p)
    name = core[-1].text
    for a in attributes(p):
        key, inner = a[0].text, spelled(a[2:-1])
        if key == "buffer":
            return Argument("BUFFER", inner, is_readonly(core), name)
        if key == "threadgroup":
            return Argument("THREADGROUP", inner, False, name)
        if key in BUILTINS:
            return Argument(BUILTINS[key], "0", True, name)
        raise SourceError(f"unknown attribute {key!r} of argument {name}", p[0])
    if any(t.text == "threadgroup" for t in core):
        return Argument("THREADGROUP", "0", False, name)
    return Argument("BUFFER", str(free), is_readonly(core), name)


def is_readonly(core: list[Token]) -> bool:
    """Whether the pointee is constant: const or constant before the first ``*`` or ``&``."""
    for t in core:
        if t.text in ("*", "&"):
            return False
        if t.text in ("const", "constant"):
            return True
    return False


def swizzle(letters: str, assigned: bool) -> str:
    alphabet = "xyzw" if letters[0] in "xyzw" else "rgba"
    indices = ", ".join(str(alphabet.index(c)) for c in letters)
    return f"template {'swizzle_ref' if assigned else 'swizzle'}<{indices}>()"


def literal(text: str) -> str:
    """A number with the type it has in Metal: without a suffix, a real number is a float."""
    if text.lower().startswith("0x"):
        return text
    m = _FLOAT.match(text)
    digits = m.group() if m else (text[:-1] if text[-1:] in "hH" and text[:-1].isdigit() else "")
    if not digits:
        return text
    suffix = text[len(digits) :].lower()
    number = digits if any(c in digits for c in ".eE") else digits + ".0"
    if suffix in ("", "f"):
        return number + "f"
    if suffix in ("h", "bf"):
        return f"{'half' if suffix == 'h' else 'bfloat'}({number}f)"
    return text
