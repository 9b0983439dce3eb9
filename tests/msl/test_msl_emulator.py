# SPDX-License-Identifier: Apache-2.0
"""The emulator of the Metal kernels: its checks catch planted bugs of every kind and leave correct kernels alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from emulated_device import EMULATOR, missing_tools, zig_cross_compiler
from emulated_metal import EmulatedMetal
from msl_build import runtime
from msl_compiler import the_compiler
from msl_coverage import executed_lines
from msl_harness import Call, EmulatorError, Run, bf16, needs_clang, run, run_many
from paths import TESTS

from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

pytestmark = needs_clang

ORDERS = ("forward", "reverse", "random")
BAD = Path(__file__).parent / "bad"
CASE = re.compile(r"// expect: ([a-z ]+?)  (\d+) x (\d+)\nkernel void (\w+)\((.*?)\) \{", re.DOTALL)


def _cases() -> list[object]:
    found = []
    for name in ("races", "memory", "divergence", "arrival"):
        text = (BAD / f"{name}.metal").read_text()
        cases = CASE.findall(text)
        assert len(cases) == len(re.findall(r"^kernel", text, re.MULTILINE)), (
            f"a kernel of {name}.metal has no expectation"
        )
        for kind, groups, threads, kernel, arguments in cases:
            buffers = 3 if "ARGUMENTS" in arguments else arguments.count("[[buffer(")
            found.append(pytest.param(name, kernel, kind, int(groups), int(threads), buffers, id=f"{name}-{kernel}"))
    return found


@pytest.mark.parametrize(("file", "kernel", "expected", "groups", "threads", "buffers"), _cases())
def test_planted_bugs_are_reported_and_controls_are_clean(
    file: str, kernel: str, expected: str, groups: int, threads: int, buffers: int
) -> None:
    source = (BAD / f"{file}.metal").read_text()
    for order in ORDERS:
        arrays = {f"b{i}": np.zeros(256, np.float32) for i in range(buffers)}
        found = run(
            kernel, arrays, grid=(groups,), threads=(threads,), source=source, checked=True, order=order, raises=False
        )
        kinds = {line.split(":")[0] for line in found.reports}
        assert kinds == (set() if expected == "clean" else {expected}), (order, found.reports)


# ---- orders and execution -------------------------------------------------------------------------------------------

ARRIVALS = """
#include <metal_stdlib>
using namespace metal;
kernel void arrivals(device atomic_uint* next [[buffer(0)]], device uint* when [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
    when[i] = atomic_fetch_add_explicit(next, 1u, memory_order_relaxed);
}
"""


def _arrivals(order: str, seed: int = 1) -> list[int]:
    arrays = {"next": np.zeros(1, np.uint32), "when": np.zeros(128, np.uint32)}
    return list(run("arrivals", arrays, grid=(2,), threads=(64,), source=ARRIVALS, order=order, seed=seed)["when"])


def test_threads_run_in_the_order_asked_for() -> None:
    forward = list(range(128))
    assert _arrivals("forward") == forward
    assert _arrivals("reverse") == forward[::-1]
    random = _arrivals("random")
    assert sorted(random) == forward
    assert random not in (forward, forward[::-1])
    assert random == _arrivals("random")
    assert random != _arrivals("random", seed=2)


SIMD = """
#include <metal_stdlib>
using namespace metal;
kernel void simd_functions(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
    device uint* z [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    const float v = x[lane];
    y[lane] = simd_sum(v);
    y[32 + lane] = simd_max(v);
    y[64 + lane] = simd_prefix_exclusive_sum(v);
    y[96 + lane] = simd_shuffle_xor(v, 5);
    y[128 + lane] = simd_shuffle_down(v, lane < 31 ? 1 : 0);
    y[160 + lane] = simd_broadcast(v, 7);
    y[192 + lane] = simd_shuffle(v, 31 - lane);
    const float2 pair = simd_shuffle_xor(float2(v, -v), 1);
    y[224 + lane] = pair.y;
    z[lane] = uint(simd_vote::vote_t(simd_ballot(v > 0)));
    z[32 + lane] = simd_and(uint(lane | 4)) + 100 * simd_or(lane) + 10000 * simd_min(lane + 3);
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_simd_functions_follow_their_definitions(order: str) -> None:
    x = np.random.default_rng(0).integers(-9, 9, 32).astype(np.float32)
    arrays = {"x": x, "y": np.zeros(256, np.float32), "z": np.zeros(64, np.uint32)}
    out = run("simd_functions", arrays, source=SIMD, order=order, checked=True)
    lane = np.arange(32)
    y = out["y"].reshape(8, 32)
    want = [np.full(32, x.sum()), np.full(32, x.max()), np.cumsum(x) - x, x[lane ^ 5], x[np.minimum(lane + 1, 31)],
            np.full(32, x[7]), x[::-1], -x[lane ^ 1]]  # fmt: skip
    for got, expected in zip(y, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    ballot = sum(1 << i for i in range(32) if x[i] > 0)
    assert (out["z"][:32] == ballot).all()
    assert (out["z"][32:] == 4 + 100 * 31 + 10000 * 3).all()


CONSTANTS = """
#include <metal_stdlib>
using namespace metal;
constant int C_BITS [[function_constant(3)]];
constant int C_OTHER [[function_constant(4)]];
constant bool has_other = is_function_constant_defined(C_OTHER);
kernel void reads(device int* o [[buffer(0)]]) { o[0] = C_BITS * 10 + has_other; }
kernel void reads_undefined(device int* o [[buffer(0)]]) { o[0] = C_OTHER; }
kernel void as_size(device int* o [[buffer(0)]]) {
    int a[C_BITS];
    a[0] = 1;
    o[0] = a[0];
}
"""
READS = CONSTANTS.split("kernel void reads_undefined")[0]


def test_function_constants_have_their_values_and_know_whether_they_are_set() -> None:
    o = {"o": np.zeros(1, np.int32)}
    assert run("reads", o, constants={"C_BITS": 4}, source=READS)["o"][0] == 40
    assert run("reads", o, constants={"C_BITS": 8, "C_OTHER": 1}, source=READS)["o"][0] == 81


@pytest.mark.parametrize(("kernel", "says"), [("reads_undefined", "C_OTHER"), ("as_size", "variable length array")])
def test_function_constants_are_neither_guessed_nor_constant_expressions(kernel: str, says: str) -> None:
    head, *kernels = CONSTANTS.split("kernel void ")
    source = head + "kernel void " + next(k for k in kernels if k.startswith(kernel + "("))
    with pytest.raises(AssertionError, match=says):
        run(kernel, {"o": np.zeros(1, np.int32)}, constants={"C_BITS": 4}, source=source)


# ---- matrix units ---------------------------------------------------------------------------------------------------


def _product(
    kernel: str, m: int, n: int, k: int, grid: tuple[int, ...], threads: int, **options: object
) -> tuple[Run, object]:
    rng = np.random.default_rng(1)
    a, b = bf16(rng.standard_normal((m, k))), bf16(rng.standard_normal((n, k)))
    arrays = {"a": a, "b": b, "c": np.zeros((m, n), np.float32), "size": np.array([m, n, k], np.int32)}
    source = (BAD / "tensor.metal").read_text()
    out = run(kernel, arrays, grid=grid, threads=(threads,), source=source, metal=400, **options)
    return out, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("order", ORDERS)
def test_tensor_operations_multiply_and_respect_extents(order: str) -> None:
    out, want = _product("product", 100, 72, 48, (3, 2), 128, checked=True, order=order)
    np.testing.assert_allclose(out["c"], 2 * want, atol=1e-4)
    assert out.distinct_read == (100 + 72) * 48 * 2 + 3 * 4
    assert out.distinct_written == 100 * 72 * 4
    out, want = _product("staged_product", 16, 32, 64, (1,), 32, checked=True, order=order)
    np.testing.assert_allclose(out["c"], want, atol=1e-4)


def test_a_kernel_that_trusts_a_layout_of_cooperative_tensors_fails_in_random_order() -> None:
    out, want = _product("trusts_layout", 16, 32, 16, (1,), 32)
    np.testing.assert_allclose(out["c"], want, atol=1e-4)
    out, want = _product("trusts_layout", 16, 32, 16, (1,), 32, order="random")
    assert not np.allclose(out["c"], want, atol=0.1)


@pytest.mark.parametrize("checked", [False, True])
def test_tensor_operations_that_read_beyond_their_operands_along_k_are_found(checked: bool) -> None:
    out, want = _product("ends_within_a_step", 16, 32, 64, (1,), 32, checked=checked)
    np.testing.assert_allclose(out["c"], want, atol=1e-4)
    with pytest.raises(EmulatorError, match="along k"):
        _product("ends_within_a_step", 16, 32, 48, (1,), 32, checked=checked)


def test_threads_that_have_run_kernels_leave_nothing_behind() -> None:
    """Stacks of a host thread take a thousand mappings; a process may have some sixty thousand."""
    failed: list[BaseException] = []

    def multiply() -> None:
        try:
            _product("simdgroup_product", 16, 16, 8, (1,), 32)
        except BaseException as problem:
            failed.append(problem)

    for _ in range(80):
        thread = Thread(target=multiply)
        thread.start()
        thread.join()
    assert not failed


@pytest.mark.parametrize("order", ORDERS)
def test_simdgroup_matrices_multiply(order: str) -> None:
    out, want = _product("simdgroup_product", 16, 16, 40, (1,), 32, checked=True, order=order)
    np.testing.assert_allclose(out["c"], want, atol=1e-4)


# ---- between dispatches, and the harness itself ---------------------------------------------------------------------

COPIES = """
#include <metal_stdlib>
using namespace metal;
kernel void add(device const float* a [[buffer(0)]], device float* b [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
    b[i] = a[i] + 1;
}
"""


@pytest.mark.parametrize(
    ("arrays", "bad"), [("abbc", True), ("abac", False), ("abcb", True), ("abca", True), ("abcd", False)]
)
def test_dispatches_without_a_barrier_must_not_depend_on_each_other(arrays: str, bad: bool) -> None:
    memory = {name: np.zeros(64, np.float32) for name in "abcd"}
    first, second = ({"a": memory[x], "b": memory[y]} for x, y in (arrays[:2], arrays[2:]))
    for barrier in (True, False):
        calls = [Call("add", given, grid=(2,), barrier=barrier) for given in (first, second)]
        found = run_many(calls, source=COPIES, checked=True, raises=False)[0].reports
        assert [line.split(":")[0] for line in found] == (["hazard"] if bad and not barrier else [])


def test_traffic_is_counted_in_all_and_once() -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void twice(device const float4* a [[buffer(0)]], device half* o [[buffer(1)]],
        uint i [[thread_position_in_grid]]) {
        o[i] = half(a[0].x + a[i / 2].y);
    }
    """
    out = run(
        "twice",
        {"a": np.zeros((8, 4), np.float32), "o": np.zeros(8, np.float16)},
        threads=(8,),
        source=source,
        checked=True,
    )
    assert (out.bytes_read, out.bytes_written) == (8 * (4 + 4), 8 * 2)
    assert (out.distinct_read, out.distinct_written) == (4 + 4 * 4, 8 * 2)


def test_more_threads_than_a_kernel_allows_are_refused() -> None:
    source = COPIES.replace("kernel void", "[[kernel, max_total_threads_per_threadgroup(64)]] void")
    arrays = {"a": np.zeros(96, np.float32), "b": np.zeros(96, np.float32)}
    run("add", arrays, threads=(64,), source=source)
    with pytest.raises(EmulatorError, match="96 in a group, the kernel allows 64"):
        run("add", arrays, threads=(96,), source=source)


@pytest.mark.parametrize("kernel", ["far", "readonly"])
def test_stray_writes_show_in_an_unchecked_run_too(kernel: str) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void far(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i + 1] = 1; }
    kernel void readonly(device const float* o [[buffer(0)]]) { ((device float*)o)[0] = 1; }
    """
    with pytest.raises(EmulatorError, match=r"outside of the array|read-only array"):
        run(kernel, {"o": np.zeros(32, np.float32)}, source=source)


def test_reports_name_kernel_file_line_group_and_thread() -> None:
    source = COPIES.replace("b[i] =", "b[i + 1] =")
    with pytest.raises(EmulatorError) as error:
        run(
            "add",
            {"a": np.zeros(64, np.float32), "b": np.zeros(64, np.float32)},
            grid=(2,),
            source=source,
            checked=True,
        )
    assert error.value.reports == [
        "bounds: add: source.metal:6: write of 4 bytes at byte 256 of b, which has 256 [group 1,0,0]"
    ]


# ---- the device -----------------------------------------------------------------------------------------------------


def _copies(barrier: bool, nbytes: int = 256) -> Plan:
    def copy(source: str, target: str, barrier: bool) -> Dispatch:
        views = View(source, 0, nbytes), View(target, 0, nbytes)
        return Dispatch(
            KERNELS["copy"], f"{source}>{target}", (), views, (256,), (1, 1, 1), (256, 1, 1), barrier=barrier
        )

    return Plan("copies", (copy("a", "b", True), copy("b", "c", barrier)), 0)


@pytest.mark.parametrize("late", [False, True])
def test_plans_run_on_the_emulated_device(late: bool) -> None:
    with EmulatedMetal(checked=True, late=late) as device:
        buffers = {name: device.buffer(256) for name in "abc"}
        buffers["a"].bytes[:] = np.arange(256)
        recorded = device.record(_copies(True), buffers)
        ticket = device.submit([recorded])
        assert (buffers["c"].bytes.sum() == 0) == late
        assert device.wait(ticket)
        np.testing.assert_array_equal(buffers["c"].bytes, np.arange(256))
        assert [(t.label, t.distinct_read, t.distinct_written) for t in device.traffic([_copies(True)])] == [
            ("a>b", 256, 256),
            ("b>c", 256, 256),
        ]


def test_a_plan_without_a_needed_barrier_fails() -> None:
    with EmulatedMetal(checked=True) as device:
        buffers = {name: device.buffer(256) for name in "abc"}
        ticket = device.submit([device.record(_copies(False), buffers)])
        with pytest.raises(DeviceError, match=r"hazard: copy: .*read of src, which an earlier dispatch accesses"):
            device.wait(ticket)
    with EmulatedMetal(order="reverse") as device:
        buffers = {name: device.buffer(256) for name in "abc"}
        buffers["a"].bytes[:] = 1
        device.wait(device.submit([device.record(_copies(False), buffers)]))
        assert buffers["c"].bytes.sum() == 0, "dispatches without a barrier change places"


def test_a_view_smaller_than_what_the_kernel_touches_fails() -> None:
    with EmulatedMetal(checked=True) as device:
        buffers = {name: device.buffer(256) for name in "abc"}
        ticket = device.submit([device.record(_copies(True, 240), buffers)])
        with pytest.raises(DeviceError, match=r"bounds: copy: .*at byte 240 of src, which has 240"):
            device.wait(ticket)


def test_the_device_refuses_what_does_not_exist() -> None:
    with pytest.raises(DeviceError, match="knows no option order=upwards"):
        EmulatedMetal(order="upwards")
    with EmulatedMetal() as device:
        plan = _copies(True)
        wide = Dispatch(**{**plan.dispatches[0].__dict__, "threads": (2048, 1, 1)})
        with pytest.raises(DeviceError, match="2048 threads in a group"):
            device.record(Plan("wide", (wide,), 0), {name: device.buffer(256) for name in "abc"})


# ---- coverage -------------------------------------------------------------------------------------------------------


def test_covered_lines_are_those_that_ran() -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    #line 1 "covered.metal"
    kernel void branches(device int* o [[buffer(0)]]) {
        if (o[0] == 0)
            o[1] = 1;
        else
            o[1] = 2;
        for (int i = 0; i < o[0]; i++) {
            o[2] = i;
        }
        o[3] = 1;
    }
    """
    run("branches", {"o": np.zeros(4, np.int32)}, threads=(1,), source=source, checked=True)
    assert executed_lines()["covered.metal"] == {2, 3, 6, 9}


def test_a_report_is_gone_after_the_run_that_made_it() -> None:
    """A command buffer that runs later, perhaps of another test, would fail of it."""
    source = "kernel void beyond(device int* o [[buffer(0)]]) { o[1] = 1; }"
    with pytest.raises(EmulatorError):
        run("beyond", {"o": np.zeros(1, np.int32)}, threads=(1,), source=source, checked=True)
    assert runtime().msl_reports() == b""


# ---- fibers ---------------------------------------------------------------------------------------------------------

_FIBERS = TESTS / "emulator"


@pytest.mark.parametrize("level", ["-O0", "-O2"])
@pytest.mark.parametrize("machine", ["here", "ucontext", "aarch64"])
def test_fibers_keep_their_registers(machine: str, level: str, tmp_path: Path) -> None:
    emulated = machine == "aarch64"
    if emulated and missing_tools():
        pytest.skip(missing_tools())
    compiled, program = tmp_path / "fiber.o", tmp_path / "fiber"
    source = _FIBERS / "checks" / "fiber_check.cpp"
    options = [level, "-fno-exceptions", *(["-DFIBER_UCONTEXT"] if machine == "ucontext" else []), "-I", str(_FIBERS)]
    # What is compiled for aarch64 needs no C++ library, and is linked as C.
    clang = zig_cross_compiler() if emulated else the_compiler().command
    subprocess.run([*clang, *options, "-x", "c++", "-c", str(source), "-o", str(compiled)], check=True)
    subprocess.run([*clang, str(compiled), "-o", str(program)], check=True)
    runner = [EMULATOR] if emulated else []
    assert subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True).stdout == "ok\n"
