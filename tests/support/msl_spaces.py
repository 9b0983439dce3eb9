# SPDX-License-Identifier: Apache-2.0
"""Type-checks shaders with their address spaces, which the translation for the emulator erases.

A syntax-only pass of clang over the source as it is, against declarations with real address spaces.  Finds pointers
that change their space, writes to constant memory, implicit conversions between vector types, arguments that no
overload takes.  Templates are checked as far as C++ does without instantiating them, and kernels with their values.
Not handled: copies of structures out of a space (C++ has no constructor for that), attributes (msl_lint.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from msl_build import EMULATOR
from msl_compiler import the_compiler

from lily.msl.preprocess import metal_defines, preprocess
from lily.msl.syntax import closing, closing_angle, is_attribute, without_attributes
from lily.msl.tokens import Token, spelled, untokenize
from lily.msl.translate import Options, Translator

_VECTOR = re.compile(r"(?:float|half|bfloat|u?int|u?short|u?char|u?long|bool)[234]")


class SpacedTranslator(Translator):
    """Keeps address spaces; makes of Metal what clang's C++ has no syntax for."""

    def __init__(self, toks: list[Token]) -> None:
        super().__init__(toks, Options())
        self.vectors = set()  # typedefs of vectors
        for i, t in enumerate(toks):
            if t.text == "typedef" and _VECTOR.fullmatch(toks[i + 1].text):
                self.vectors.add(toks[i + 2].text)

    def rewritten(self, toks: list[Token]) -> list[Token]:
        out: list[Token] = []
        i = 0
        while i < len(toks):
            t = toks[i]
            following = toks[i + 1].text if i + 1 < len(toks) else ""
            if is_attribute(toks, i):
                i = closing(toks, i) + 1
                continue
            if t.text == "kernel":
                i += 1
                continue
            if t.text == "constant" and any(x.text == "constexpr" for x in toks[max(0, i - 2) : i + 2]):
                t = t.with_text("const")  # Metal copies a structure out of a space, C++ does not
            if t.text == "coherent" and following != "(":
                i += 1
                continue
            if t.kind == "num":
                t = super().rewritten([t])[0]
            elif following == "(" and (_VECTOR.fullmatch(t.text) or t.text in self.vectors):
                t = t.with_text(f"metal::msl_make<{t.text}>")
            elif t.text == "vec" and following == "<":
                end = closing_angle(toks, i + 1)
                if end + 1 < len(toks) and toks[end + 1].text == "(":
                    t = t.with_text(f"metal::msl_make<{spelled(self.rewritten(toks[i : end + 1]))}>")
                    i = end
            elif t.text == "is_function_constant_defined":
                t = t.with_text("true")
                i = closing(toks, i + 1)
            out.append(t)
            i += 1
        return out

    def function_constant(self, head: list[Token], index: str) -> None:
        plain = without_attributes(head)
        self.out += [*plain, plain[-1].with_text("= {};")]

    def internal(self, out: list[Token]) -> None:
        pass


def space_errors(source: str, metal: int = 320, flags: Sequence[str] = ()) -> list[str]:
    """What is wrong with the types of ``source``, one ``file:line: message`` each."""
    t = SpacedTranslator(preprocess(source, "source.metal", metal_defines(metal)))
    i = 0
    while i < len(t.toks):
        i = t.declaration(i, len(t.toks), in_class=False)
    text = untokenize(t.out)
    for inst in t.instances:  # what a template kernel does with its types
        if inst.base in t.kernels:
            text += f'#line {inst.at.line} "{inst.at.file}"\nauto msl_instance_{id(inst)} = &{inst.function};\n'
    command = [
        *the_compiler().command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-", "-Wno-everything",
        "-include", str(EMULATOR / "msl_spaces.h"), "-Werror=incompatible-pointer-types", "-Werror=narrowing",
        "-ferror-limit=50", "-fno-caret-diagnostics", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return _errors(done.stderr.splitlines())


def _errors(lines: list[str]) -> list[str]:
    """Errors as file:line: message; one inside the declarations gets the place that led there."""
    found = []
    for i, line in enumerate(lines):
        m = re.match(r"(.*?:\d+):\d+: error: (.*)", line)
        if not m:
            continue
        place = m[1]
        if "msl_spaces.h" in place:
            notes = (re.match(r"(.*?:\d+):\d+: note: .*requested here", n) for n in lines[i + 1 :])
            place = next((n[1] for n in notes if n and "msl_spaces.h" not in n[1]), place)
        found.append(f"{place}: {m[2]}")
    return found
