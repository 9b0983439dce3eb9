# SPDX-License-Identifier: Apache-2.0
"""A translated source: its declarations, its kernels, and which of the declarations a kernel needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lily.msl.tokens import Token, tokenize

# Attribute of a kernel argument → its name in the emulator's and CUDA's binding tables.
BUILTINS = {
    "thread_position_in_grid": "GRID_POSITION",
    "thread_position_in_threadgroup": "GROUP_POSITION",
    "threadgroup_position_in_grid": "GROUP_INDEX",
    "thread_index_in_threadgroup": "LINEAR_INDEX",
    "thread_index_in_simdgroup": "LANE",
    "simdgroup_index_in_threadgroup": "SIMDGROUP",
    "thread_index_in_quadgroup": "QUAD_LANE",
    "quadgroup_index_in_threadgroup": "QUADGROUP",
    "simdgroups_per_threadgroup": "SIMDGROUPS",
    "dispatch_simdgroups_per_threadgroup": "SIMDGROUPS",
    "threads_per_threadgroup": "GROUP_SIZE",
    "dispatch_threads_per_threadgroup": "GROUP_SIZE",
    "threads_per_grid": "GRID_SIZE",
    "threadgroups_per_grid": "GROUPS",
    "threads_per_simdgroup": "SIMD_WIDTH",
    "thread_execution_width": "SIMD_WIDTH",
}


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel: ``kind`` is BUFFER, THREADGROUP or a value of BUILTINS."""

    kind: str
    index: str = "0"
    readonly: bool = False
    name: str = ""


@dataclass(frozen=True)
class Entry:
    """A kernel that the host can name: ``function`` is the C++ expression for it."""

    name: str
    function: str
    arguments: tuple[Argument, ...]
    max_threads: str = "0"
    file: str = ""
    line: int = 0


@dataclass
class Chunk:
    """One declaration at the outer level; ``names`` is empty for what every kernel needs (using namespace …)."""

    tokens: list[Token]
    names: frozenset[str]

    @property
    def uses(self) -> set[str]:
        return {t.text for t in self.tokens if t.kind == "id"}


@dataclass
class Translation:
    """``constants`` are the function constants by name, with their index."""

    chunks: list[Chunk] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)

    def needed_by(self, entries: Sequence[Entry]) -> list[Chunk]:
        """The declarations that these kernels reach, by name: what does not matter to them does not change them."""
        named: dict[str, list[Chunk]] = {}
        for chunk in self.chunks:
            for name in chunk.names:
                named.setdefault(name, []).append(chunk)
        chosen = {id(c) for c in self.chunks if not c.names}
        mentioned = (text for e in entries for text in (e.function, e.max_threads, *(a.index for a in e.arguments)))
        todo = [t.text for text in mentioned for t in tokenize(text)]
        todo += [n for c in self.chunks if not c.names for n in c.uses]
        seen = set(todo)
        while todo:
            for chunk in named.get(todo.pop(), ()):
                if id(chunk) not in chosen:
                    chosen.add(id(chunk))
                    new = chunk.uses - seen
                    seen |= new
                    todo += new
        return [c for c in self.chunks if id(c) in chosen]
