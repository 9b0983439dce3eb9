# SPDX-License-Identifier: Apache-2.0
"""`lily doctor`: what it reports, that it finds what is wrong, and that nothing ends it early.

Devices: the cpu device, the same with tampered results, and the emulated metal device, whole and broken.
Not handled: whether figures are true (they are this machine's); kernels themselves (their own tests).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal.engine import emulated_metal
from metal.standin import Standin, standin
from metal.toolchain import Missing
from msl_harness import needs_clang

from lily.cli import run
from lily.device import Device
from lily.doctor import SCHEMA, examine, limits, machine, render, runs
from lily.doctor.cases import MEASURED, SIZES, cases, reference_policy
from lily.doctor.generation import generation
from lily.doctor.inputs import make_inputs
from lily.doctor.machine import scrub
from lily.doctor.values import Quantised, encoded
from lily.errors import InvalidRequestError
from lily.kernels import KERNELS
from lily.plan.views import Dispatch
from lily.policy import POLICIES, policy_for

SMALL = ("small",)
ON_THIS_MACHINE = ("cpu", "metal") if sys.platform == "darwin" else ("cpu",)
FEW = ("gemv_norm", "gemm", "route_topk", "copy", "probe_level")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures from next to no memory and time."""
    monkeypatch.setattr(limits, "ARENA", 4 << 20)
    monkeypatch.setattr(limits, "BUDGET", 0.0)


@pytest.fixture
def metal(tmp_path: Path) -> Iterator[Standin]:
    try:
        standin()
    except Missing as problem:
        pytest.skip(str(problem))
    with emulated_metal(tmp_path) as device:
        yield device


def by_kernel(document: dict[str, Any], size: str = "small") -> dict[str, str]:
    return {row["kernel"]: row["checks"][size]["status"] for row in document["kernels"]}


def json_of(args: Sequence[str], capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert run(["doctor", "--json", *args]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return document


# ---- a sound device -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return examine("cpu", quick=True, sizes=SMALL)


@pytest.mark.parametrize("device", ON_THIS_MACHINE)
def test_every_kernel_of_the_table_is_checked_and_right(device: str) -> None:
    document = examine(device, quick=True, sizes=SMALL)
    assert set(by_kernel(document)) == set(KERNELS)
    assert set(by_kernel(document).values()) == {"pass"}
    assert document["ok"]
    assert document["problems"] == []
    assert document["schema"] == SCHEMA == "lily-doctor/1"


def test_machine_and_device_say_what_is_here(checked: dict[str, Any]) -> None:
    assert {"system", "system_version", "chip", "architecture", "memory_bytes", "python", "lily"} <= set(
        checked["machine"]
    )
    assert checked["machine"]["memory_bytes"] > 1 << 28
    device = checked["device"]
    assert device["requested"] == device["name"] == "cpu"
    assert device["opened"]
    assert {way["what"] for way in device["ways"]} == {"instruction set", "activations", "threads"}
    with Device("cpu") as cpu:
        assert device["info"]["isa"] == cpu.info["isa"]
    assert checked["reference"]["isa"] == "portable"


def test_text_has_a_line_for_every_kernel_and_explains_itself(checked: dict[str, Any]) -> None:
    text = render(checked)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for name in KERNELS:
        assert any(line[0] == name and "pass" in line for line in lines), name
    assert "No problem found" in text
    assert "What the figures mean" in text
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.full
@pytest.mark.parametrize("device", ON_THIS_MACHINE)
def test_every_kernel_is_right_at_its_real_shape(device: str) -> None:
    document = examine(device, quick=True, sizes=("real",))
    assert document["problems"] == []
    assert {row["checks"]["real"]["status"] for row in document["kernels"]} == {"pass"}


def test_a_few_kernels_are_right_at_their_real_shapes() -> None:
    kernels = ("gemv_norm", "gdn_step", "attn_decode", "route_group", "argmax")
    document = examine("cpu", quick=True, sizes=("real",), kernels=kernels)
    assert by_kernel(document, "real") == dict.fromkeys(kernels, "pass")
    shapes = {row["kernel"]: row["checks"]["real"]["shape"] for row in document["kernels"]}
    assert shapes["gemv_norm"] == "12352×2048"
    assert shapes["route_group"] == "63 rows, 8 of 256 experts"


def test_what_is_measured_has_units_limits_and_shares(short: None) -> None:
    document = examine("cpu", sizes=SMALL, kernels=FEW)
    assert document["problems"] == []
    rates = {row["kernel"]: row.get("rate") for row in document["kernels"]}
    used = document["limits"]["used"]
    gemv, gemm = rates["gemv_norm"], rates["gemm"]
    assert gemv["bytes_per_s"] == pytest.approx(gemv["bytes"] / gemv["seconds"])
    assert gemv["share"] == pytest.approx(gemv["bytes_per_s"] / used["read_bytes_per_s"])
    assert gemm["flop_per_s"] == pytest.approx(2 * 512 * 12352 * 2048 / gemm["seconds"])
    assert gemm["share"] == pytest.approx(gemm["flop_per_s"] / used["matrix_flop_per_s"])
    assert rates["probe_level"] is None
    for key in ("level_s", "dispatch_s", "submit_s", "read_bytes_per_s", "copy_bytes_per_s", "matrix_flop_per_s"):
        assert document["limits"]["before"][key] > 0
    text = render(document)
    assert "TFLOP/s" in text
    assert "GB/s" in text


def test_the_bytes_of_a_product_are_its_weights_once() -> None:
    case = next(c for c in cases("cpu", MEASURED)[0] if c.name == "gemv_norm")
    weights = 12352 * 2048 // 2 + 2 * 2 * 12352 * 2048 // 64
    assert case.tested.bytes_read + case.tested.bytes_written == weights + 4 * (2048 + 2048 + 12352)


def test_generation_counts_seconds_of_tokens() -> None:
    found = generation("cpu", rest=0.01)
    assert found["model"] == "lily-tiny"
    assert found["tokens_per_s"] == pytest.approx(1 / found["token_s"])
    assert 0 < found["token_s"] < found["first_token_s"] + 1
    assert found["rest_s"] == 0.01


def test_command_writes_one_json_object_and_progress_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json_of(["--device", "cpu", "--quick", "--kernel", "gemv", "--kernel", "copy"], capsys, 0)
    assert by_kernel(document) == {"gemv": "pass", "copy": "pass"}
    assert run(["doctor", "--device", "cpu", "--quick", "--kernel", "gemv"]) == 0
    out, err = capsys.readouterr()
    assert "gemv" in out
    assert err.startswith("lily: checking")


def test_a_kernel_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="no kernel 'gemw'"):
        examine("cpu", kernels=["gemw"])


def test_nothing_in_the_report_names_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    monkeypatch.setenv("LILY_METAL", f"cache={tmp_path}/jane/cache")
    monkeypatch.setenv("LILY_OTHER", "secret")
    text = json.dumps(examine("cpu", quick=True, sizes=SMALL, kernels=["copy"]))
    assert "jane" not in text
    assert "secret" not in text
    assert "cache=~/cache" in text
    assert scrub({"a": ["/Users/jane/x", "/home/joe/y z"]}) == {"a": ["~/x", "~/y z"]}


def test_machine_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "kern.osversion": b"24F74\0", "hw.model": b"Mac16,1\0", "machdep.cpu.brand_string": b"Apple M4\0",
        "hw.memsize": (16 << 30).to_bytes(8, "little"), "hw.perflevel0.logicalcpu": (4).to_bytes(4, "little"),
        "hw.perflevel1.logicalcpu": (6).to_bytes(4, "little"), "sysctl.proc_translated": (1).to_bytes(4, "little"),
    }  # fmt: skip
    monkeypatch.setattr(machine, "_sysctl", known.get)
    monkeypatch.setattr(sys, "platform", "darwin")
    found = machine.machine()
    assert found["chip"] == "Apple M4"
    assert (found["performance_cores"], found["efficiency_cores"]) == (4, 6)
    assert found["memory_bytes"] == 16 << 30
    assert found["rosetta"]
    assert not found["virtual_machine"]
    document = {"machine": found, "ok": True, "seconds": 0, "quick": True, "problems": []}
    text = render(document)
    assert "Apple M4, Mac16,1: 4 performance and 6 efficiency cores" in text
    assert "Rosetta" in text


# ---- cases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", list(POLICIES))
@pytest.mark.parametrize("size", [*SIZES.values(), MEASURED], ids=[*SIZES, "measured"])
def test_both_devices_are_given_arguments_of_the_same_meaning(device: str, size: Any) -> None:
    policy = policy_for(device)
    found, missing = cases(device, size)
    assert {case.kernel for case in found} | set(missing) == set(KERNELS)
    for case in found:
        assert case.reference is not None, case.name
        if size.name != "small":
            continue
        inputs = make_inputs(case, policy)
        for value in inputs.values():
            assert isinstance(value, Quantised) or value.dtype.names or value.size
        encoded(case.tested, inputs, policy)  # ValueError for sizes that do not fit
        encoded(case.reference, inputs, reference_policy(policy))


def test_inputs_are_the_same_each_time_and_depend_on_the_seed() -> None:
    case = cases("cpu", SIZES["small"])[0][2]
    first, again, other = (
        encoded(case.tested, make_inputs(case, POLICIES["cpu"], s), POLICIES["cpu"]) for s in (0, 0, 1)
    )
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["w"], other["w"])


# ---- what is wrong --------------------------------------------------------------------------------------------------


class Tampered:
    """Bench.run of the device under test, whose result for one kernel is changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: str, change: Any) -> None:
        original = runs.Bench.run

        def run_tampered(bench: runs.Bench, dispatch: Dispatch, inputs: Any) -> Any:
            out = original(bench, dispatch, inputs)
            if dispatch.kernel.name == kernel and bench.device.info["isa"] != "portable":
                change(out)
            return out

        monkeypatch.setattr(runs.Bench, "run", run_tampered)


def _scale(name: str, factor: float) -> Any:
    def change(out: dict[str, Any]) -> None:
        out[name] = out[name] * np.float32(factor)

    return change


def _put(name: str, at: int, value: float) -> Any:
    def change(out: dict[str, Any]) -> None:
        out[name][at] = value

    return change


@pytest.mark.parametrize(
    ("kernel", "change", "says"),
    [
        ("gemv_norm", _put("y", 5, 3.0), r"y\[5\] is 3, the reference has"),
        ("gemv_norm", _scale("y", 1.02), r"y\[\d+\] is"),  # the worst error is within its limit, the mean is not
        ("gemv_norm", _put("y", 5, float("nan")), r"y\[5\] is nan"),
        ("gemm", _put("y", -1, 0.0), r"y\[\d+\] is 0.0, the reference has nan"),  # a row beyond the step's
        ("attn_decode", _scale("part_ml", 1.001), "part_ml column"),
        ("rmsnorm", _scale("y", 1.0001), "y"),
        ("route_topk", _put("ids", 3, 0), r"ids\[3\]"),
        ("route_group", _put("order", 0, 1), r"order\[0\]"),
        ("copy", _put("dst", 70, 1), r"dst\[70\]"),
        ("sample_filter", _put("cut", 0, -1e9), "kept"),
        ("argmax", _put("best", 1, 0.0), "best ids"),
        ("attn_prep", _scale("k", 1.02), r"k\["),
        ("gdn_step", _scale("s_out", 1.001), "s_out"),
        ("probe_matrix", _scale("y", 1.001), "y"),
    ],
)
def test_a_wrong_result_is_reported(
    kernel: str, change: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Tampered(monkeypatch, kernel, change)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=[kernel, "swiglu"])
    assert by_kernel(document) == {kernel: "fail", "swiglu": "pass"}
    assert not document["ok"]
    [problem] = document["problems"]
    assert kernel in problem["what"]
    assert re.search(says, problem["text"]), problem["text"]
    assert "--device cpu" in problem["remedy"]
    assert f"{kernel} " in render(document)
    assert "FAIL" in render(document)


def test_a_wrong_result_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Tampered(monkeypatch, "gemv_norm", _scale("y", 2))
    document = json_of(["--device", "cpu", "--quick", "--kernel", "gemv_norm"], capsys, 1)
    assert [row["checks"]["small"]["status"] for row in document["kernels"]] == ["fail"]


def test_weights_that_lie_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two words of a matrix change places on the device that comes second, the one under test."""
    original, turns = runs.encoded, iter(range(100))

    def swapped(dispatch: Dispatch, inputs: Any, policy: Any) -> Any:
        out = original(dispatch, inputs, policy)
        if next(turns) % 2:
            words = out["w"].view(np.uint32)
            words[[0, 1]] = words[[1, 0]]
        return out

    monkeypatch.setattr(runs, "encoded", swapped)
    assert by_kernel(examine("cpu", quick=True, sizes=SMALL, kernels=["gemv_residual"])) == {"gemv_residual": "fail"}


def test_a_device_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    original, answers = Device.wait, iter([True, True, True, False])  # the reference's turn, then the tested device's

    def wait(device: Device, ticket: int, timeout: float | None = None) -> bool:
        return original(device, ticket, timeout) and next(answers)

    monkeypatch.setattr(Device, "wait", wait)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["copy", "rmsnorm", "swiglu"])
    assert by_kernel(document) == {"copy": "pass", "rmsnorm": "error", "swiglu": "skipped"}
    assert "did not finish within 30 s" in document["problems"][0]["text"]
    assert not document["ok"]


def test_what_does_not_fit_is_skipped_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "available_bytes", lambda: 100_000)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["gemv_norm", "probe_level"])
    assert by_kernel(document) == {"gemv_norm": "skipped", "probe_level": "pass"}
    assert document["ok"]
    assert "0.00 GB are available: gemv_norm" in render(document)


def test_modules_that_were_not_built_leave_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lily.device", None)
    document = examine("cpu")
    assert not document["ok"]
    assert "make build" in document["problems"][0]["remedy"]
    assert "Machine" in render(document)


@pytest.mark.skipif(sys.platform == "darwin", reason="there is a metal device here")
def test_metal_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    document = json_of(["--device", "metal"], capsys, 1)
    assert document["device"]["opened"] is False
    assert document["machine"]["lily"]
    assert run(["doctor", "--device", "metal"]) == 1
    out = capsys.readouterr().out
    assert "cannot be opened: there is no 'metal' device in this build" in out
    assert "macOS 15" in out
    assert "--device cpu" in out


# ---- the metal device, emulated -------------------------------------------------------------------------------------


@needs_clang
def test_metal_kernels_are_right(metal: Standin) -> None:
    document = examine("metal", quick=True, sizes=SMALL, kernels=("embed", "gemm", "attn_decode", "sample_filter"))
    assert set(by_kernel(document).values()) == {"pass"}, document["problems"]
    ways = {way["what"]: way for way in document["device"]["ways"]}
    assert ways["matrix unit"]["value"] == "simdgroup bfloat"
    assert "Apple10" in ways["matrix unit"]["why"]
    assert ways["GPU"] == {"what": "GPU", "value": "Stand-in M0", "why": "family apple9"}
    assert document["reference"]["isa"] in ("avx512", "avx2", "neon", "portable")
    assert {row["variant"] for row in document["kernels"] if row["kernel"] == "attn_decode"} == {"", "long"}


@needs_clang
@pytest.mark.full
@pytest.mark.parametrize("family", [8, 9, 10])
def test_every_metal_kernel_is_right(family: int, metal: Standin) -> None:
    metal.set(family=family, macos=26.2)
    document = examine("metal", quick=True, sizes=SMALL)
    assert set(by_kernel(document).values()) == {"pass"}, document["problems"]
    assert set(by_kernel(document)) == set(KERNELS)


@needs_clang
def test_a_metal_kernel_without_pipeline_is_an_error_and_the_rest_goes_on(metal: Standin) -> None:
    metal.set(fail_pipeline=2)
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "rmsnorm", "swiglu", "last_row"))
    assert sorted(by_kernel(document).values()) == ["error", "pass", "pass", "pass"]
    [problem] = document["problems"]
    assert "--device cpu" in problem["remedy"]


@needs_clang
def test_a_failed_command_buffer_is_an_error_and_the_rest_goes_on(metal: Standin) -> None:
    metal.set(fail_submission=2, fail_code=3, fail_text="page fault")
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "rmsnorm", "swiglu", "last_row"))
    # The second submission of every queue fails: after each failure the device is opened anew.
    assert list(by_kernel(document).values()) == ["pass", "error", "pass", "error"]
    assert "page fault" in document["problems"][0]["text"]


@needs_clang
def test_memory_that_the_gpu_does_not_give_is_an_error(metal: Standin) -> None:
    metal.set(fail_buffer=1)
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "swiglu"))
    assert by_kernel(document) == {"copy": "error", "swiglu": "pass"}
    assert "refused a buffer" in document["problems"][0]["text"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"no_default": 1, "no_devices": 1}, "no GPU"),
        ({"fail_compile": 1}, "does not compile"),
        ({"fail_queue": 1}, "no command queue"),
        ({"macos": 14.2}, "needs macOS 15"),
        ({"family": 6}, "needs 7 (M1)"),
    ],
)
@needs_clang
def test_a_gpu_that_does_not_open_is_reported_with_cause_and_remedy(
    settings: dict[str, float], says: str, metal: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    metal.set(**settings)
    document = json_of(["--device", "metal", "--quick"], capsys, 1)
    assert document["machine"]["system"]
    assert document["device"]["opened"] is False
    assert says in document["device"]["error"]
    [problem] = document["problems"]
    assert "--device cpu" in problem["text"] + problem["remedy"]


@needs_clang
def test_metal_figures(metal: Standin, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits and one kernel; the emulator's figures mean nothing, so any will do."""
    monkeypatch.setattr(limits, "LEVELS", 8)
    monkeypatch.setattr(limits, "ARENA", 1 << 20)
    monkeypatch.setattr(limits, "_MATRIX_GROUPS", 1)
    monkeypatch.setattr(limits, "_SUBMISSIONS", 3)
    document = examine("metal", sizes=SMALL, kernels=["copy"])
    assert document["problems"] == []
    assert document["limits"]["before"]["level_s"] > 0
    assert document["kernels"][0]["rate"]["bytes_per_s"] > 0
