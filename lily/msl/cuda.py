# SPDX-License-Identifier: Apache-2.0
"""CUDA C++: a translated source with one ``extern "C" __global__`` function for each kernel.

The text wants the headers of ``INCLUDE`` on its include path, C++20 and -arch of the GPU.  Shader code lies in a
namespace of its own, so that ``::exp`` and ``::float4`` of CUDA do not collide with Metal's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from lily.msl.host import value_macros
from lily.msl.tokens import untokenize
from lily.msl.translation import Entry, Translation

INCLUDE = Path(__file__).parent / "include"

_ENTRY = """extern "C" __global__ void{bounds} {name}(const MslCudaLaunch launch) {{
    using namespace metal::msl_shader;
    constexpr auto function = &metal::msl_shader::{function};
    using Signature = msl::signature<std::remove_const_t<decltype(function)>>;
    msl::call<Signature, msl::binding<{flat}>, std::make_index_sequence<{count}>>::template run<function>(launch);
}}
"""


def cuda_source(
    translation: Translation, only: Collection[str] | None = None, values: Mapping[str, object] | None = None
) -> str:
    """The kernels that ``only`` names (all without it); ``values`` has function constants by the shader's name.

    ``translation`` must be one for the target cuda.
    """
    chosen = [e for e in translation.entries if only is None or e.name in only]
    tokens = [t for chunk in translation.needed_by(chosen) for t in chunk.tokens if t.kind != "mark"]
    return "".join(
        [
            value_macros(values or {}),
            '#include "msl_cuda.h"\n',
            "namespace metal { namespace msl_shader {\n",
            untokenize(tokens),
            '\n#line 1 "entries"\n}}\n',
            *(_entry(e) for e in chosen),
        ]
    )


def _entry(e: Entry) -> str:
    limit = "" if e.max_threads == "0" else f" __launch_bounds__((metal::msl_shader::{e.max_threads}))"
    if e.max_threads.isdigit() and e.max_threads != "0":
        limit = f" __launch_bounds__({e.max_threads})"
    flat = ", ".join(f"msl::{a.kind}, ({a.index})" for a in e.arguments)
    return _ENTRY.format(bounds=limit, name=e.name, function=e.function, flat=flat, count=len(e.arguments))
