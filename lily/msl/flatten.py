# SPDX-License-Identifier: Apache-2.0
"""The one source string that a Metal compiler gets: kernel table header, function constants, shaders in order.

Everything that compiles shaders (the Metal device, the tests, a CUDA device to come) starts from this string.
``#line`` directives keep compiler messages at the file they belong to.
"""

from __future__ import annotations

import re
from pathlib import Path

from lily.kernels import KERNELS, c_header

SHADERS = Path(__file__).parent.parent / "data" / "shaders"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


def constant_index() -> dict[str, int]:
    """Index of every function constant; the numbering is global because Metal's is global to a library."""
    names: dict[str, int] = {}
    for kernel in KERNELS.values():
        for name in kernel.constants:
            names.setdefault(name, len(names))
    return names


def constant_name(name: str) -> str:
    """What shaders call the constant ``name`` of the kernel table."""
    return "C_" + name.upper()


def preamble(act_f32: bool = False) -> str:
    """What precedes the shader files: the table's structures and every function constant."""
    lines = ["#include <metal_stdlib>", "#define LILY_ACT_F32 1" if act_f32 else "", '#line 1 "kernel_table.h"']
    lines.append(c_header())
    lines.append('#line 1 "function_constants.h"')
    lines += [f"constant int {constant_name(n)} [[function_constant({i})]];" for n, i in constant_index().items()]
    return "\n".join(lines) + "\n"


def shader_files(folder: Path = SHADERS) -> list[Path]:
    """Headers in the order of their includes, then the Metal sources, both otherwise by name."""
    headers = {p.name: p for p in sorted(folder.glob("*.h"))}
    ordered: list[Path] = []

    def visit(path: Path, trail: tuple[str, ...]) -> None:
        if path in ordered:
            return
        if path.name in trail:
            raise ValueError(f"shader headers include each other: {' -> '.join([*trail, path.name])}")
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            if name not in headers:
                raise ValueError(
                    f"{path.name} includes {name!r}; the shaders have {', '.join(headers) or 'no headers'}"
                )
            visit(headers[name], (*trail, path.name))
        if path.suffix == ".h":
            ordered.append(path)

    sources = sorted(folder.glob("*.metal"))
    for path in [*headers.values(), *sources]:
        visit(path, ())
    return ordered + sources


def flatten(folder: Path = SHADERS, act_f32: bool = False) -> str:
    """All shaders of ``folder`` as one self-contained source; ``act_f32`` makes activations float32 (for tests)."""
    parts = [preamble(act_f32)]
    for path in shader_files(folder):
        text = _ONCE.sub("", _INCLUDE.sub("", path.read_text(encoding="utf-8")))
        parts.append(f'#line 1 "{path.name}"\n{text}')
    return "\n".join(parts)
