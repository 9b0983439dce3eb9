# SPDX-License-Identifier: Apache-2.0
"""The system's clang and the one inside ziglang make kernels of the same results and reports.

Each case runs with kernels of both on one emulator, and once more in a process in which zig made the emulator, too.
Not handled: machines with zig alone, where there is nothing to compare and every shader test runs with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msl_build
import msl_compiler
import msl_harness
import numpy as np
import pytest
import shader_attention_decode as attention_decode
import shader_attention_prefill as attention_prefill
import shader_decode as decode
import shader_gdn as gdn
import shader_gemm as gemm
import shader_route as route
from msl_compiler import Compiler
from msl_harness import EmulatorError, needs_emulator, run

BOTH = msl_compiler.system_clang(), msl_compiler.zig_clang()
pytestmark = [
    needs_emulator,
    pytest.mark.skipif(None in BOTH, reason="one clang alone is here; remedy: apt-get install clang-19"),
]

Array = Any
# Of what a compiled kernel depends on; the emulator itself stays the one that the session has.
CACHES = (msl_build._load, msl_build._precompiled, msl_build._headers_hash)
CASES: dict[str, Callable[[], Any]] = {
    "norm and product": lambda: decode.Row(9, 512, 4, 64).check("gemv_norm"),
    "product in float32": lambda: decode.Row(9, 320, 8, 32, act="f32").check("gemv_norm"),
    "dense product": lambda: gemm.check_rows(9, 32, 320),
    "dense product by tensor operations": lambda: gemm.check_rows(9, 32, 400),
    "GDN step": lambda: gdn.check_step(gdn.layer_of(gdn.Shape(1, 2), 1)),
    "GDN scan": lambda: gdn.check_scan(gdn.layer_of(gdn.Shape(1, 2), 9), parts=8),
    "attention of a row": lambda: attention_decode.check_decode(
        attention_decode.layer_of(attention_decode.REAL, 257), checked=True
    ),
    "attention": lambda: attention_prefill.Attention(2, 1, 256, 63, 3, spare=0).check(metal=320),
    "routing": lambda: route.check_topk(256, 8, True, "random"),
}  # fmt: skip
BEYOND = """
#include <metal_stdlib>
using namespace metal;
kernel void beyond(device const float* a [[buffer(0)]], device float* b [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
    threadgroup float shared[32];
    shared[i % 32] = a[i];
    b[i + 1] = shared[31 - i % 32] + float(int(a[i]) >> 1);
}
"""


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Compiler | None], None]]:
    """Lets the kernels that run next be compiled by another compiler, until the test ends."""
    msl_build.runtime()

    def choose(compiler: Compiler | None) -> None:
        monkeypatch.setattr(msl_build, "the_compiler", lambda: compiler)
        for cached in CACHES:
            cached.cache_clear()

    yield choose
    monkeypatch.undo()
    for cached in CACHES:
        cached.cache_clear()


def results_of(case: Callable[[], Any]) -> list[Array]:
    """What every kernel of a case wrote, in order."""
    seen: list[Array] = []

    def note(calls: Sequence[Any], results: Sequence[msl_harness.Run], options: Any) -> None:
        seen.extend(array for result in results for array in result.arrays.values())

    before, msl_harness.recorder = msl_harness.recorder, note
    try:
        case()
    finally:
        msl_harness.recorder = before
    return seen


def as_bytes(arrays: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("case", CASES)
def test_kernels_of_both_compilers_compute_the_same_bits(
    case: str, compile_with: Callable[[Compiler | None], None]
) -> None:
    found = []
    for compiler in BOTH:
        compile_with(compiler)
        found.append(as_bytes(results_of(CASES[case])))
    assert found[0]
    assert found[0] == found[1]


def test_both_compilers_report_the_same_faults(compile_with: Callable[[Compiler | None], None]) -> None:
    found = []
    for compiler in BOTH:
        compile_with(compiler)
        arrays = {"a": np.zeros(64, np.float32), "b": np.zeros(64, np.float32)}
        with pytest.raises(EmulatorError) as error:
            run("beyond", arrays, threads=(64,), source=BEYOND, checked=True)
        found.append(error.value.reports)
    assert {line.split(":")[0] for line in found[0]} == {"bounds", "race", "uninitialised"}
    assert sorted(found[0]) == sorted(found[1])


OTHER_PROCESS = """
import importlib, sys
import numpy as np
tests = importlib.import_module(sys.argv[2])
for name, case in tests.CASES.items():
    for i, data in enumerate(tests.as_bytes(tests.results_of(case))):
        np.save(f"{sys.argv[1]}/{name}.{i}.npy", np.frombuffer(data, np.uint8))
"""


@pytest.mark.full  # zig compiles its C++ library for this, a minute the first time
def test_the_emulator_itself_computes_the_same_whoever_compiled_it(tmp_path: Path, repository: Path) -> None:
    assert BOTH[0] is not None
    files = []
    for choice in (BOTH[0].command[0], "zig"):
        folder = tmp_path / Path(choice).name
        folder.mkdir()
        this = Path(__file__)
        environment = os.environ | {"LILY_CLANG": choice, "PYTHONPATH": os.pathsep.join([*sys.path, str(this.parent)])}
        command = [sys.executable, "-c", OTHER_PROCESS, str(folder), this.stem]
        subprocess.run(command, env=environment, cwd=repository, check=True)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0]
    assert files[0] == files[1]
