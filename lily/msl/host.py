# SPDX-License-Identifier: Apache-2.0
"""C++ for the host: a translated source with a table of its kernels, for the emulator of the tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lily.msl.tokens import Token, untokenize
from lily.msl.translation import Entry, Translation

_ENTRY = """static const MslArgument msl_arguments_{n}[] = {{{arguments}}};
static void msl_entry_{n}(const MslLaunch* launch, MslLane* lane) {{
    constexpr auto function = &{function};
    using Signature = msl::signature<std::remove_const_t<decltype(function)>>;
    msl::call<Signature, msl::binding<{flat}>, std::make_index_sequence<{count}>>::template run<function>(launch, lane);
}}
"""


@dataclass(frozen=True)
class HostSource:
    """``text`` is a C++ file that exports ``msl_kernels``; it is compiled behind the header msl_host.h.

    ``statements`` are the places that coverage marks, by the index of their byte in ``msl_covered``.
    """

    text: str
    statements: tuple[tuple[str, int], ...]


def host_source(
    translation: Translation, only: Collection[str] | None = None, values: Mapping[str, object] | None = None
) -> HostSource:
    """The kernels that ``only`` names (all without it) and what they need.

    ``values`` has function constants by the name the shader uses.
    """
    chosen = [e for e in translation.entries if only is None or e.name in only]
    statements: list[tuple[str, int]] = []
    tokens: list[Token] = []
    for t in (t for chunk in translation.needed_by(chosen) for t in chunk.tokens):
        if t.kind == "mark":
            t = t.with_text(f"MSL_COVER({len(statements)});", "id")
            statements.append((t.file, t.line))
        tokens.append(t)
    parts = [value_macros(values or {}), untokenize(tokens), '#line 1 "entries"\n', "using namespace metal;\n"]
    rows = []
    for n, e in enumerate(chosen):
        parts.append(_entry(n, e))
        rows.append(f'    {{"{e.name}", msl_entry_{n}, msl_arguments_{n}, {len(e.arguments)}, {e.max_threads}}},\n')
    parts.append(
        'extern "C" MSL_EXPORT const MslKernel msl_kernels[] = {\n' + "".join(rows) + "    {0, 0, 0, 0, 0}};\n"
    )
    parts.append(f"MSL_COVERED({len(statements)})\n")
    return HostSource("".join(parts), tuple(statements))


def value_macros(values: Mapping[str, object]) -> str:
    """Definitions that give function constants their values."""
    texts = {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in values.items()}
    return "".join(f"#define MSL_VALUE_{name} {text}\n" for name, text in sorted(texts.items()))


def _entry(n: int, e: Entry) -> str:
    rows = ", ".join(f'{{msl::{a.kind}, ({a.index}), {int(a.readonly)}, "{a.name}"}}' for a in e.arguments)
    flat = ", ".join(f"msl::{a.kind}, ({a.index})" for a in e.arguments)
    return _ENTRY.format(n=n, arguments=rows or "{}", function=e.function, flat=flat, count=len(e.arguments))
