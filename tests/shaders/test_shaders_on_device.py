# SPDX-License-Identifier: Apache-2.0
"""Every shader once through the metal device: the backend that runs all shader tests on a Mac, and the shim below it.

On Linux the device is the shim on the stand-in (msl_device.py); ``LILY_SHADERS=device pytest tests/test_shaders_*.py``
runs all shader tests that way.  Not handled: edges and sizes (the tests that are called here, with more parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import msl_build
import msl_device
import numpy as np
import pytest
import sampling_filter_tests
import sampling_tests
import shader_attention_decode as attention_decode
import shader_attention_prefill as attention_prefill
import shader_decode as decode
import shader_gdn as gdn
import shader_gemm as gemm
import shader_moe as moe
import shader_probe as probe
import shader_route as route
from kernel_calls import Call
from metal.standin import require_standin
from msl_harness import SLACK, bf16, run, run_call, run_many, step
from msl_survey import survey
from quantised import random_quantised

from lily.kernels import KERNELS

Array = Any


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Shaders run on the device; the names of those that did."""
    if not msl_device.ON_A_MAC:
        require_standin()
    names: set[str] = set()
    whole = msl_device.run_on_device

    def noting(calls: list[Call], *rest: Any) -> list[dict[str, Array]]:
        results = whole(calls, *rest)
        names.update(call.kernel for call in calls)
        return results

    monkeypatch.setenv("LILY_SHADERS", "device")
    monkeypatch.setattr(msl_device, "run_on_device", noting)
    msl_device.matrix_operands.cache_clear()
    yield names
    msl_device.matrix_operands.cache_clear()


def gemvs() -> None:
    for kernel in decode.GEMVS:
        decode.Row(9, 512, 8, 64).check(kernel)


def scans() -> None:
    gdn.check_scan(gdn.layer_of(gdn.Shape(1, 2), 9), parts=8)
    gdn.check_scan(gdn.layer_of(gdn.Shape(1, 2, 32, 48), 8), spare=1, threads=64, name="gdn_scan_blocked")


def dense_products() -> None:
    for metal in gemm.METAL:
        gemm.check_rows(9, 32, metal)
    gemm.check_router_logits(16, 8)
    gemm.check_gate_times_up(33, 33, 4, 32, 320)
    gemm.check_residual(9, 31, 4, 32, 320)


def expert_products() -> None:
    for metal in gemm.METAL:
        moe.check_uneven(7, 3, 32, 4, metal)
    moe.check_expanded_products(32, 320)


def logit_steps() -> None:
    sampling_tests.test_bias_is_added_and_may_ban(run_call)
    sampling_tests.test_argmax_gives_ties_to_the_lowest_id(run_call)
    sampling_tests.test_draw_is_the_gumbel_maximum_of_its_counter(run_call, 0.7, SLACK)
    sampling_tests.test_top_logits_in_order_with_ties_to_the_lower_id(run_call, 5000, 20)
    sampling_tests.test_scores_are_log_softmax_of_the_raw_logits(run_call, SLACK, 5)
    sampling_tests.test_advance_gives_log_probabilities_of_the_raw_logits(run_call, SLACK)


# What is run, and the kernels that this must reach.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "embed": (lambda: decode.check_embedding(order="forward", bits=4, group=32), "embed"),
    "rmsnorm": (lambda: decode.check_rmsnorm(512, "forward"), "rmsnorm"),
    "last row": (decode.check_last_row, "last_row"),
    "copy": (lambda: decode.check_copy(65_552), "copy"),
    "gemv": (gemvs, " ".join(decode.GEMVS)),
    "experts of one row": (lambda: (decode.Moe().check_gate_up(), decode.Moe().check_down()), "moe_gate_up moe_down"),
    "single matrices": (lambda: decode.check_single_matrices(False), "moe_gemv"),
    "swiglu": (lambda: decode.check_swiglu(33, "forward"), "swiglu"),
    "GDN step": (lambda: gdn.check_step(gdn.layer_of(gdn.Shape(1, 2), 1)), "gdn_step"),
    "GDN convolution": (lambda: gdn.check_conv(gdn.layer_of(gdn.Shape(1, 2), 7), parts=2, spare=1), "gdn_conv"),
    "GDN scans": (scans, "gdn_scan gdn_scan_blocked"),
    "GDN gate": (lambda: gdn.check_gated_norm(gdn.REAL, "forward"), "gdn_gate"),
    "attention of a row": (
        lambda: attention_decode.check_decode(attention_decode.layer_of(attention_decode.REAL, 257)), "attn_decode"
    ),
    "prepared attention": (
        lambda: attention_decode.check_prepared(1, "forward"), "attn_decode_prepared"
    ),
    "combine": (lambda: attention_decode.check_combine(256, 256, "forward"), "attn_combine"),
    "preparation": (
        lambda: attention_prefill.check_preparation(4, 2, 64, 16, 0),
        "attn_prep",
    ),
    "attention": (
        lambda: [attention_prefill.Attention(2, 1, 256, 63, 3, spare=0).check(metal=m) for m in gemm.METAL],
        "attn_prefill",
    ),
    "dense products": (dense_products, "gemm gemm_f32 gemm_swiglu gemm_residual"),
    "expert products": (expert_products, "moe_gemm_gate_up moe_gemm_down moe_gemm_expanded"),
    "expert sums": (lambda: moe.check_combine(3, 256, 8, 8), "moe_combine"),
    "expansion": (lambda: moe.check_expansion(4, 96, 32), "expand"),
    "routing": (lambda: route.check_topk(256, 8, True, "forward"), "route_topk"),
    "grouping": (lambda: route.check_grouped(256, 8, 32, 9), "route_group"),
    "logits": (logit_steps, "sample_logits argmax sample_draw top_logprobs score_rows advance"),
    "filters": (lambda: sampling_filter_tests.test_top_k_is_exact(run_call, 20), "sample_filter"),
    "probes": (
        lambda: (probe.level(), probe.read(20_000, 4096, 64), probe.matrix(2)), "probe_level probe_read probe_matrix"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_on_the_device_what_they_compute_on_the_emulator(case: str, ran: set[str]) -> None:
    check, kernels = CASES[case]
    try:
        check()
    finally:
        assert ran <= set(kernels.split())
    assert ran == set(kernels.split())


def test_no_kernel_of_the_shaders_is_left_out() -> None:
    names = {f.name for f in survey(msl_build.shader_source()).functions if f.is_kernel}
    assert {name for _, kernels in CASES.values() for name in kernels.split()} == names


def test_float_activations_reach_the_device() -> None:
    decode.Row(11, 320, 4, 64, act="f32").check("gemv_norm")


def test_the_language_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if msl_device.ON_A_MAC:
        pytest.skip("Apple's compiler does not tell")
    seen: set[tuple[str, int, str]] = set()
    compile = msl_build.kernel_library

    def noting(kernel: str, *rest: Any, metal: int, act: str, **more: Any) -> Any:
        seen.add((kernel, metal, act))
        return compile(kernel, *rest, metal=metal, act=act, **more)

    monkeypatch.setattr(msl_build, "kernel_library", noting)
    for metal in gemm.METAL:
        gemm.check_rows(9, 32, metal)
    decode.Row(11, 320, 4, 64, act="f32").check("gemv_norm")
    assert seen == {("gemm", 320, "bf16"), ("gemm", 400, "bf16"), ("gemv_norm", 320, "f32")}


def test_calls_share_memory_and_run_in_order() -> None:
    a, b, c = (np.full(64, v, np.uint8) for v in (1, 2, 3))
    copy = {"params": {"bytes": 64}, "threads": (256,)}
    out = run_many([Call("copy", {"src": a, "dst": b}, **copy), Call("copy", {"src": b, "dst": c}, **copy)])
    np.testing.assert_array_equal(out[1]["dst"], a)


def test_gpus_without_bfloat_arithmetic_multiply_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Apple9 the shim defines LILY_MATRIX_F32; the tests' reference follows."""
    if msl_device.ON_A_MAC:
        pytest.skip("this GPU has its own family")
    monkeypatch.setattr(msl_device, "FAMILY", 8)
    gemm.check_width(96, 32, 4, 320)
    weights = random_quantised(np.random.default_rng(1), 4, 64, 4, 64)
    np.testing.assert_array_equal(gemm.weights_of(weights), weights.dense)


# ---- the backend itself ---------------------------------------------------------------------------------------------


def copy(count: int) -> None:
    run("copy", {"src": np.ones(96, np.uint8), "dst": np.ones(64, np.uint8)}, {"bytes": count}, threads=(256,))


def test_a_write_beyond_an_argument_is_found() -> None:
    copy(64)
    with pytest.raises(AssertionError, match="copy wrote beyond the end of dst"):
        copy(80)


def test_a_write_to_an_argument_that_is_only_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KERNELS["copy"]
    monkeypatch.setitem(KERNELS, "copy", replace(table, args=tuple(replace(a, access="r") for a in table.args)))
    with pytest.raises(AssertionError, match="copy changed dst, which may only be read"):
        run("copy", {"src": np.ones(64, np.uint8), "dst": np.zeros(64, np.uint8)}, {"bytes": 64}, threads=(256,))


def test_what_a_kernel_did_not_write_is_not_a_number() -> None:
    args = {"step": step(0, 1), "x": bf16(np.ones((2, 64))), "norm": np.ones(64, np.float32)}
    out = run("rmsnorm", {**args, "y": bf16(np.zeros((2, 64)))}, {"k": 64, "eps": 0}, grid=(2,), threads=(64,))
    assert np.isnan(out["y"][1].astype(np.float32)).all()
    assert (out["y"][0] == ml_dtypes.bfloat16(1)).all()


def test_what_a_device_cannot_do_skips_the_test_and_never_passes() -> None:
    arrays = {"src": np.ones(64, np.uint8), "dst": np.zeros(64, np.uint8)}
    out = run("copy", arrays, {"bytes": 64}, threads=(256,), checked=True)
    with pytest.raises(pytest.skip.Exception, match="does not count the bytes"):
        assert out.distinct_read
    with pytest.raises(pytest.skip.Exception, match="emulator only"):
        run("copy", arrays, {"bytes": 64}, threads=(256,), source="kernel void copy() {}")


def test_a_gpu_without_tensor_operations_skips_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    if msl_device.ON_A_MAC:
        pytest.skip("this GPU has them or not")
    monkeypatch.setattr(msl_device, "TENSOR_UNITS", {"family": 9, "macos": 26.2})
    with pytest.raises(pytest.skip.Exception, match="no tensor operations: simdgroup bfloat"):
        gemm.check_rows(9, 32, 400)
