# SPDX-License-Identifier: Apache-2.0
"""A shader source as the rules look at it: its functions, their bodies, and the names that are constants."""

from __future__ import annotations

from dataclasses import dataclass, field

from lily.msl.preprocess import metal_defines, preprocess
from lily.msl.syntax import attributes, closing, split_commas, without_attributes
from lily.msl.tokens import Token
from lily.msl.translate import Options, Translator


@dataclass
class Function:
    head: list[Token]
    body: list[Token]  # with its braces
    opening: int  # of the parameters, in head
    is_kernel: bool
    constants: frozenset[str] = frozenset()  # of the classes around it
    arrays: set[str] = field(default_factory=set)  # members of its class

    @property
    def name(self) -> str:
        return self.head[self.opening - 1].text

    @property
    def parameters(self) -> list[list[Token]]:
        return split_commas(self.head[self.opening + 1 : closing(self.head, self.opening)])


@dataclass
class Survey:
    """A source as the rules look at it."""

    tokens: list[Token]
    functions: list[Function] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)  # names that are constant expressions, or will be
    host_names: list[Token] = field(default_factory=list)


class _Surveyor(Translator):
    def __init__(self, toks: list[Token]) -> None:
        super().__init__(toks, Options())
        self.survey = Survey(toks)
        self.around: list[tuple[frozenset[str], set[str]]] = []  # of each class: constants, arrays

    def function(self, i: int, stop: int, in_class: bool) -> int:
        head = self.toks[i:stop]
        opening = self.parameter_list(head)
        assert opening is not None
        kernel = any(t.text == "kernel" for t in head) or any(a[0].text == "kernel" for a in attributes(head))
        body = self.toks[stop : closing(self.toks, stop) + 1]
        constants = frozenset().union(*(c for c, _ in self.around))
        arrays = self.around[-1][1] if self.around else set()
        self.survey.functions.append(Function(head, body, opening, kernel, constants, arrays))
        return super().function(i, stop, in_class)

    def kernel(self, head: list[Token], opening: int) -> None:
        """Nothing to bind; what is wrong with a kernel is for the rules to say."""

    def class_definition(self, i: int, stop: int, kind: str) -> int:
        if kind == "enum":
            self.survey.constants |= {t.text for t in self.toks[stop : closing(self.toks, stop)] if t.kind == "id"}
        self.around.append((frozenset(t.text for t in self.toks[i:stop] if t.kind == "id"), set()))
        end = super().class_definition(i, stop, kind)
        self.around.pop()
        return end

    def simple_declaration(self, head: list[Token], in_class: bool) -> None:
        words = {t.text for t in head}
        if "constant" in words or "constexpr" in words:
            self.survey.constants |= {t.text for t in head if t.kind == "id"}
        elif in_class and self.around and "(" not in words:
            for part in split_commas(without_attributes(head)):
                bracket = next((k for k, t in enumerate(part) if t.text == "["), 0)
                if bracket and part[bracket - 1].kind == "id":
                    self.around[-1][1].add(part[bracket - 1].text)
        super().simple_declaration(head, in_class)


def survey(source: str, metal: int = 320) -> Survey:
    """Reads a source; SourceError where it is not understood."""
    s = _Surveyor(preprocess(source, "source.metal", metal_defines(metal)))
    i = 0
    while i < len(s.toks):
        i = s.declaration(i, len(s.toks), in_class=False)
    s.survey.host_names = [a[2] for a in attributes(s.toks) if a[0].text == "host_name"]
    return s.survey
