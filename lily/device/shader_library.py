# SPDX-License-Identifier: Apache-2.0
"""Shader libraries that ``make metallib`` compiled ahead of time: which there are, how, and whether they are current.

The Metal device needs none of them: without, it compiles the same source when it opens.  One source makes several
libraries, as GPUs differ in language and in the operands of their matrix units; objc_shim/metal_library.m takes the
one for its GPU by name.  Not handled: compiling (tools/metallib.py); libraries with float32 activations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lily.msl.flatten import flatten

FOLDER = Path(__file__).parents[1] / "metal"
STAMP = "metallib.stamp"

# What MTLCompileOptions says in objc_shim/metal_library.m, in the words of the command-line compiler.
MATH = ("-fmetal-math-mode=relaxed", "-fmetal-math-fp32-functions=precise")


@dataclass(frozen=True)
class Variant:
    """One library; ``macos`` is the oldest system that takes it."""

    name: str
    language: str
    macos: str
    macros: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """Of Apple's ``metal`` compiler."""
        macros = tuple(f"-D{macro}" for macro in self.macros)
        return (f"-std=metal{self.language}", f"-mmacosx-version-min={self.macos}", *MATH, *macros)


VARIANTS = (
    Variant("lily-3.2", "3.2", "15.0"),
    Variant("lily-3.2-f32", "3.2", "15.0", ("LILY_MATRIX_F32=1",)),  # M1, M2
    Variant("lily-4.0", "4.0", "26.0"),  # tensor operations; not every Xcode knows it
)


def stamp(source: str) -> str:
    """What the stamp file holds for libraries made of ``source``."""
    digest = hashlib.sha256(source.encode())
    for variant in VARIANTS:
        digest.update("\0".join((variant.name, *variant.flags)).encode())
    return digest.hexdigest()


def shader_options(source: str | None = None, folder: Path = FOLDER) -> dict[str, str]:
    """Options of the Metal device that name the libraries of ``folder``; none if they are not of this very source.

    ``source`` is the flattened source. The device still needs it: a library for its GPU may be missing.
    """
    try:
        made = (folder / STAMP).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return {}
    return {"metallib": str(folder)} if made == stamp(flatten() if source is None else source) else {}
