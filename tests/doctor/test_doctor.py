# SPDX-License-Identifier: Apache-2.0
"""``lily doctor``: what it reports, that it finds what is wrong, and that nothing ends it early.

Devices: the cpu device, the same with tampered results, and the emulated metal device, whole and broken.
Not handled: whether figures are true (they are this machine's); kernels themselves (their own tests).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal.standin import Standin
from msl_harness import needs_clang
from remedies import instead
from waiting import PATIENCE

from lily.checks import runs
from lily.checks.cases import MEASURED, SIZES, Case, cases, numbers, reference_policy
from lily.checks.inputs import make_inputs
from lily.checks.values import Quantised, encoded
from lily.cli import run
from lily.device import sysctl
from lily.device.device import CommandList, Device
from lily.doctor import SCHEMA, ceilings, examine, examiner, machine, render
from lily.doctor.machine import scrub
from lily.errors import DeviceError, InvalidRequestError
from lily.kernels import KERNELS, Kernel
from lily.plan.views import Dispatch, Plan
from lily.policy import POLICIES, policy_for

SMALL = ("small",)
ON_THIS_MACHINE = ("cpu", "metal") if sys.platform == "darwin" else ("cpu",)
FEW = ("gemv_norm", "gemm", "route_topk", "copy", "probe_level")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures from next to no memory and time."""
    monkeypatch.setattr(ceilings, "ARENA", 4 << 20)
    monkeypatch.setattr(ceilings, "BUDGET", 0.0)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nothing is left out for want of time."""
    monkeypatch.setattr(examiner, "MEASURED_UNTIL", 1e6)


def by_kernel(document: dict[str, Any], size: str = "small") -> dict[str, str]:
    """Status of each kernel; "mixed" if it is not the same for all of its variants."""
    found: dict[str, str] = {}
    for row in document["kernels"]:
        status = row["checks"][size]["status"]
        found[row["kernel"]] = status if found.get(row["kernel"], status) == status else "mixed"
    return found


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


def test_text_has_a_line_for_every_kernel_and_says_where_it_is_explained(checked: dict[str, Any]) -> None:
    text = render(checked)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for name in KERNELS:
        assert any(line[0] == name and "pass" in line for line in lines), name
    assert "No problem found" in text
    assert "lily doctor --explain" in text
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_figures_are_explained_in_the_width_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("lily.cli.doctor.terminal_width", lambda stream: width)
    assert run(["doctor", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert width - 15 < max(map(len, lines)) <= width
    assert all(
        any(line.startswith(f"  {figure}:") for line in lines) for figure in ("check", "rate", "share", "ceilings")
    )


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


def test_what_there_is_no_time_to_measure_is_skipped_and_checked_all_the_same(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examiner, "MEASURED_UNTIL", -1.0)
    document = examine("cpu", sizes=SMALL, kernels=["copy", "gemv_norm"])
    rows = [row for row in document["kernels"] if row["kernel"] == "gemv_norm"]
    assert {row["rate"]["status"] for row in rows} == {"skipped"}
    assert all("no time left" in row["rate"]["text"] for row in rows)
    assert by_kernel(document) == {"copy": "pass", "gemv_norm": "pass"}


def test_what_is_measured_has_units_ceilings_and_shares(short: None) -> None:
    document = examine("cpu", sizes=SMALL, kernels=FEW)
    assert document["problems"] == []
    rates = {row["kernel"]: row.get("rate") for row in document["kernels"]}
    used = document["ceilings"]["used"]
    gemv, gemm = rates["gemv_norm"], rates["gemm"]
    assert gemv["bytes_per_s"] == pytest.approx(gemv["bytes"] / gemv["seconds"])
    assert gemv["share"] == pytest.approx(gemv["bytes_per_s"] / used["read_bytes_per_s"])
    assert gemm["flop_per_s"] == pytest.approx(2 * 512 * 12352 * 2048 / gemm["seconds"])
    assert gemm["share"] == pytest.approx(gemm["flop_per_s"] / used["matrix_flop_per_s"])
    assert rates["probe_level"] is None
    for key in ("level_s", "dispatch_s", "submit_s", "read_bytes_per_s", "copy_bytes_per_s", "matrix_flop_per_s"):
        assert document["ceilings"]["before"][key] > 0
    text = render(document)
    assert "TFLOP/s" in text
    assert "GB/s" in text


def test_the_bytes_of_a_product_are_its_weights_once() -> None:
    case = next(c for c in cases("cpu", MEASURED) if c.name == "gemv_norm")
    weights = 12352 * 2048 // 2 + 2 * 2 * 12352 * 2048 // 64
    assert case.tested.bytes_read + case.tested.bytes_written == weights + 4 * (2048 + 2048 + 12352)


@pytest.mark.parametrize("dependent", [True, False])
def test_a_lost_dispatch_is_noticed_where_dispatches_are_counted(
    dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Device.record

    def record_less(device: Device, plan: Plan, buffers: Any) -> CommandList:
        return record(device, replace(plan, dispatches=(*plan.dispatches[:100], *plan.dispatches[101:])), buffers)

    rig = runs.Rig(lambda: Device("cpu", threads=1), POLICIES["cpu"])
    assert ceilings._levels(rig, dependent) > 0
    monkeypatch.setattr(Device, "record", record_less)
    with pytest.raises(DeviceError, match="dispatches were lost"):
        ceilings._levels(rig, dependent)
    rig.close()


def test_command_writes_one_json_object_and_progress_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(sysctl, "raw", known.get)
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
    found = cases(device, size)
    assert {case.kernel for case in found} == set(KERNELS)
    assert len({case.name for case in found}) == len(found)
    for case in found if size.name == "small" else ():
        inputs = make_inputs(case, policy)
        for value in inputs.values():
            assert isinstance(value, Quantised) or value.dtype.names or value.size
        encoded(case.tested, inputs, policy)  # ValueError for sizes that do not fit
        encoded(case.reference, inputs, reference_policy(policy))


@pytest.mark.parametrize("device", list(POLICIES))
def test_every_tile_that_a_device_has_is_checked(device: str) -> None:
    policy = policy_for(device)
    tiles: dict[str, set[int]] = {}
    for case in cases(device, SIZES["small"]):
        if "tile_m" in case.tested.kernel.constants:
            tiles.setdefault(case.kernel, set()).add(numbers(case.tested)["tile_m"])
            assert case.variant == f"tile {numbers(case.tested)['tile_m']}"
    assert set(tiles) == {name for name, kernel in KERNELS.items() if "tile_m" in kernel.constants}
    for name, found in tiles.items():
        assert found == {t for _, t in (policy.gemm_tiles if name.startswith("gemm") else policy.moe_tiles)}, name


@pytest.mark.parametrize("device", list(POLICIES))
def test_what_is_measured_was_checked(device: str) -> None:
    assert {case.name for case in cases(device, MEASURED)} <= {case.name for case in cases(device, SIZES["small"])}


def test_an_expert_has_several_tiles_and_the_last_is_not_full() -> None:
    """Else one tile of rows could be computed for all."""
    for name in ("moe_gemm_gate_up (tile 32)", "moe_gemm_gate_up (tile 64)"):
        case = next(c for c in cases("metal", SIZES["small"]) if c.name == name)
        blocks = make_inputs(case, POLICIES["metal"])["blocks"]
        assert isinstance(blocks, np.ndarray)
        experts = blocks[0::2].tolist()
        assert experts.count(0) > 1, name
        assert -1 in experts, name


def test_inputs_are_the_same_each_time_and_depend_on_the_seed() -> None:
    case = next(case for case in cases("cpu", SIZES["small"]) if case.kernel == "gemv_norm")
    first, again, other = (
        encoded(case.tested, make_inputs(case, POLICIES["cpu"], s), POLICIES["cpu"]) for s in (0, 0, 1)
    )
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["w"], other["w"])


# ---- what is wrong --------------------------------------------------------------------------------------------------


class Tampered:
    """Rig.run of the device under test, whose result for one kernel is changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: str, change: Any) -> None:
        original, turns = runs.Rig.run, count()

        def run_tampered(rig: runs.Rig, dispatch: Dispatch, inputs: Any) -> Any:
            out = original(rig, dispatch, inputs)
            if dispatch.kernel.name == kernel and next(turns) % 2:  # the reference runs first
                change(out)
            return out

        monkeypatch.setattr(runs.Rig, "run", run_tampered)


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
        ("gemv_norm", _scale("y", 1.02), r"y\[\d+\] is"),  # the worst error is within its tolerance, the mean is not
        ("gemv_norm", _put("y", 5, float("nan")), r"y\[5\] is nan"),
        ("gemv_norm", _put("y", 5, float("inf")), r"y\[5\] is inf"),
        ("gemm", _put("y", -1, 0.0), r"y\[\d+\] is 0.0, the reference has nan"),  # a row beyond the step's
        ("attn_decode", _scale("part_ml", 1.001), "part_ml column"),
        ("rmsnorm", _scale("y", 1.0001), "y"),
        ("route_topk", _put("ids", 3, 0), r"ids\[3\]"),
        ("route_group", _put("order", 0, -1), r"order\[0\]"),
        ("copy", _put("dst", 70, 1), r"dst\[70\]"),
        ("sample_filter", _put("cut", 0, -1e9), "kept"),
        ("argmax", _put("best", 1, 0.0), "best ids"),
        ("attn_prep", _scale("k", 1.02), r"k\["),
        ("gdn_step", _scale("s_out", 1.001), "s_out"),
        ("probe_matrix", _scale("y", 1.001), "y"),
    ],
)
def test_a_wrong_result_is_reported(kernel: str, change: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Tampered(monkeypatch, kernel, change)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=[kernel, "swiglu"])
    assert by_kernel(document) == {kernel: "fail", "swiglu": "pass"}
    assert not document["ok"]
    [problem] = document["problems"]
    assert kernel in problem["what"]
    assert re.search(says, problem["text"]), problem["text"]
    assert problem["remedy"].startswith(f"results are wrong: do not trust what this device writes; {instead()}")
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
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["embed", "rmsnorm", "swiglu"])
    assert by_kernel(document) == {"embed": "pass", "rmsnorm": "error", "swiglu": "skipped"}
    assert "did not finish within 30 s" in document["problems"][0]["text"]
    assert document["problems"][0]["remedy"] == f"it does not run; {instead()}"
    assert not document["ok"]


def test_a_device_that_does_not_answer_while_ceilings_are_measured_is_given_up(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, wait, close = Device.submit, Device.wait, Device.close
    submitted, hanging = "", []

    def note(device: Device, lists: Any) -> int:
        nonlocal submitted
        submitted = next(item.name for item in lists)
        return submit(device, lists)

    def hang(device: Device, ticket: int, timeout: float | None = None) -> bool:
        assert device not in hanging
        done = wait(device, ticket, timeout)
        if submitted == "probe_matrix":
            hanging.append(device)
            return False
        return done

    def close_what_answers(device: Device) -> None:
        assert device not in hanging  # it would be waited for without end
        close(device)

    monkeypatch.setattr(Device, "submit", note)
    monkeypatch.setattr(Device, "wait", hang)
    monkeypatch.setattr(Device, "close", close_what_answers)
    monkeypatch.setattr(examiner, "generation", lambda *_: pytest.fail("an engine would wait without end"))
    monkeypatch.setattr(examiner, "cases", lambda *of: [c for c in cases(*of) if c.kernel in ("copy", "rmsnorm")])
    document = examine("cpu", sizes=SMALL)
    assert by_kernel(document) == {"copy": "pass", "rmsnorm": "pass"}
    assert [row["rate"]["text"] for row in document["kernels"]] == ["an earlier kernel did not finish"] * 2
    before = document["ceilings"]["before"]
    assert before["copy_bytes_per_s"] > 0
    assert [before[name] for name in ("matrix_flop_per_s", "level_s", "dispatch_s", "submit_s")] == [None] * 4
    assert document["ceilings"]["after"] == before
    [problem] = document["problems"]
    assert problem["what"] == "ceiling matrix_flop_per_s"
    assert "did not finish" in problem["text"]
    assert "not measured" in render(document)
    close(hanging[0])


def test_what_ends_the_measuring_leaves_the_checks_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise DeviceError("gone")

    monkeypatch.setattr(examiner, "ceilings", fail)
    document = examine("cpu", sizes=SMALL, kernels=["copy"])
    assert by_kernel(document) == {"copy": "pass"}
    assert document["device"]["error"] == "gone"
    assert "stopped: gone" in render(document)


def test_on_the_portable_path_there_is_no_other_to_turn_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_CPU", "portable")

    def wrong(case: Case, *_: object) -> Any:
        return original(case, *_) if case.kernel == "copy" else replace(original(case, *_), status="fail", text="wrong")

    original = examiner.check
    monkeypatch.setattr(examiner, "check", wrong)
    [problem] = examine("cpu", quick=True, sizes=SMALL, kernels=["copy", "rmsnorm"])["problems"]
    assert problem["remedy"].endswith("writes; send this report")


# ---- the reference is wrong ------------------------------------------------------------------------------------------


def fail_on_the_reference(monkeypatch: pytest.MonkeyPatch, kernel: str, error: DeviceError) -> None:
    """Runs of one kernel fail there."""
    original = runs.Rig.run

    def run_or_fail(rig: runs.Rig, dispatch: Dispatch, inputs: Any) -> Any:
        if rig.device.info["isa"] == "portable" and dispatch.kernel.name == kernel:
            rig.failed, rig.hangs = True, isinstance(error, runs.DeviceHangs)
            raise error
        return original(rig, dispatch, inputs)

    monkeypatch.setattr(runs.Rig, "run", run_or_fail)


def test_an_error_of_the_reference_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, object]] = []
    original = Device

    def open_device(name: str, **options: object) -> Device:
        opened.append(options)
        return original(name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(examiner, "Device", open_device)
    fail_on_the_reference(monkeypatch, "rmsnorm", DeviceError("broken"))
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["embed", "rmsnorm", "swiglu"])
    assert by_kernel(document) == {"embed": "pass", "rmsnorm": "error", "swiglu": "pass"}
    [problem] = document["problems"]
    assert problem["text"] == "on the reference device: broken"
    assert problem["remedy"] == "nothing is known of the device under test: send this report"
    assert [options.get("isa") for options in opened] == [None, "portable", "portable"]


def test_a_reference_that_does_not_answer_ends_the_checks_but_not_the_measuring(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_the_reference(monkeypatch, "rmsnorm", runs.DeviceHangs("it did not finish"))
    document = examine("cpu", sizes=SMALL, kernels=["embed", "rmsnorm", "swiglu"])
    assert by_kernel(document) == {"embed": "pass", "rmsnorm": "error", "swiglu": "skipped"}
    rows = {row["kernel"]: row for row in document["kernels"]}
    assert rows["swiglu"]["checks"]["small"]["text"] == "on the reference device: an earlier kernel did not finish"
    assert rows["swiglu"]["rate"]["status"] == "measured"


def test_a_reference_that_does_not_open_is_not_blamed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Device

    def open_device(name: str, **options: Any) -> Device:
        if options.get("isa") == "portable":
            raise DeviceError("no such path")
        return original(name, **options)

    monkeypatch.setattr(examiner, "Device", open_device)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["copy"])
    assert document["device"]["opened"]
    assert "error" not in document["device"]
    assert by_kernel(document) == {"copy": "skipped"}
    [problem] = document["problems"]
    assert (problem["what"], problem["text"]) == ("reference, the cpu device", "no such path")
    assert "there is no reference: no such path" in render(document)


def test_what_does_not_fit_is_skipped_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "available_bytes", lambda: 100_000)
    document = examine("cpu", quick=True, sizes=SMALL, kernels=["gemv_norm", "probe_level"])
    assert by_kernel(document) == {"gemv_norm": "skipped", "probe_level": "pass"}
    assert document["ok"]
    assert "0.00 GB are available: gemv_norm" in render(document)


@pytest.mark.parametrize("missing", ["lily.run._submit", "numpy"])
def test_what_is_not_built_or_installed_leaves_the_machine(missing: str) -> None:
    code = "import sys; sys.modules[sys.argv[1]] = None; from lily.cli import run; sys.exit(run(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code, missing], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["chip"] == machine.machine()["chip"]
    [problem] = document["problems"]
    assert (problem["what"], problem["text"]) == ("build", f"the module {missing} is missing")
    assert "make build" in problem["remedy"]
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
def test_metal_kernels_are_right(emulated: Standin) -> None:
    kernels = ("embed", "gemm", "moe_gemm_down", "attn_decode", "sample_filter")
    document = examine("metal", quick=True, threads=4, sizes=SMALL, kernels=kernels)  # threads are the cpu device's
    assert by_kernel(document) == dict.fromkeys(kernels, "pass"), document["problems"]
    ways = {way["what"]: way for way in document["device"]["ways"]}
    assert ways["matrix unit"]["value"] == "simdgroup bfloat"
    assert "Apple10" in ways["matrix unit"]["why"]
    assert ways["GPU"] == {"what": "GPU", "value": "Stand-in M0", "why": "family apple9"}
    assert document["reference"]["isa"] in ("avx512", "avx2", "neon", "portable")
    assert {row["variant"] for row in document["kernels"] if row["kernel"] == "attn_decode"} == {"", "long"}
    assert {row["variant"] for row in document["kernels"] if row["kernel"] == "gemm"} == {
        "tile 16",
        "tile 32",
        "tile 64",
    }


@needs_clang
@pytest.mark.parametrize("right", [True, False])
def test_the_remedy_for_tensor_operations_follows_what_an_engine_does(
    right: bool, emulated: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.set(family=10, macos=26.2)
    original = runs.Rig.run

    def run_changed(rig: runs.Rig, dispatch: Dispatch, inputs: Any) -> Any:
        out = original(rig, dispatch, inputs)
        if not right and rig.device.name == "metal" and dispatch.kernel.name in ("gemm", "swiglu"):
            out["y"][:] = 1
        return out

    monkeypatch.setattr(runs.Rig, "run", run_changed)
    document = examine("metal", quick=True, sizes=SMALL, kernels=("gemm_residual", "gemm", "swiglu"))
    remedies = {problem["what"].partition(" (")[0]: problem["remedy"] for problem in document["problems"]}
    if right:
        assert document["device"]["tensor_check"] == "passed"
        assert remedies == {}
        assert "check of tensor operations: passed" in render(document)
        return
    assert document["device"]["tensor_check"].startswith("failed, simdgroup_matrix is used: gemm (tile 16)")
    assert set(remedies) == {"tensor operations", "kernel gemm", "kernel swiglu, small shape"}
    for what in ("tensor operations", "kernel gemm"):
        assert "Lily runs without tensor operations here" in remedies[what]
        assert "--device cpu" not in remedies[what]
    assert "use --device cpu" in remedies["kernel swiglu, small shape"]


@needs_clang
@pytest.mark.full
@pytest.mark.parametrize("family", [8, 9, 10])
def test_every_metal_kernel_is_right(family: int, emulated: Standin) -> None:
    emulated.set(family=family, macos=26.2)
    document = examine("metal", quick=True, sizes=SMALL)
    assert set(by_kernel(document).values()) == {"pass"}, document["problems"]
    assert set(by_kernel(document)) == set(KERNELS)


@needs_clang
def test_a_metal_kernel_without_pipeline_is_an_error_and_the_rest_goes_on(
    emulated: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Device.kernel

    def refuse(device: Device, kernel: Kernel, *rest: Any) -> int:
        if (device.name, kernel.name) == ("metal", "rmsnorm"):
            raise DeviceError("no pipeline")
        return get(device, kernel, *rest)

    monkeypatch.setattr(Device, "kernel", refuse)
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "rmsnorm", "swiglu", "last_row"))
    assert sorted(by_kernel(document).values()) == ["error", "pass", "pass", "pass"]
    [problem] = document["problems"]
    assert "--device cpu" in problem["remedy"]


@needs_clang
def test_a_failed_command_buffer_is_an_error_and_the_rest_goes_on(emulated: Standin) -> None:
    emulated.set(fail_submission=2, fail_code=3, fail_text="page fault")
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "rmsnorm", "swiglu", "last_row"))
    # The second submission of every queue fails: after each failure the device is opened anew.
    assert list(by_kernel(document).values()) == ["pass", "error", "pass", "error"]
    assert "page fault" in document["problems"][0]["text"]


@needs_clang
def test_memory_that_the_gpu_does_not_give_is_an_error(emulated: Standin) -> None:
    emulated.set(fail_buffer=1)
    document = examine("metal", quick=True, sizes=SMALL, kernels=("copy", "swiglu"))
    assert by_kernel(document) == {"swiglu": "error", "copy": "pass"}
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
    settings: dict[str, float], says: str, emulated: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated.set(**settings)
    document = json_of(["--device", "metal", "--quick"], capsys, 1)
    assert document["machine"]["system"]
    assert document["device"]["opened"] is False
    assert says in document["device"]["error"]
    [problem] = document["problems"]
    assert "--device cpu" in problem["text"] + problem["remedy"]


@needs_clang
def test_metal_figures(emulated: Standin, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings and one kernel; the emulator's figures mean nothing, so any will do."""
    monkeypatch.setattr(ceilings, "LEVELS", 8)
    monkeypatch.setattr(ceilings, "ARENA", 1 << 20)
    monkeypatch.setattr(ceilings, "_MATRIX_GROUPS", 1)
    monkeypatch.setattr(ceilings, "_SUBMISSIONS", 3)
    document = examine("metal", sizes=SMALL, kernels=["copy"])
    assert document["problems"] == []
    assert document["ceilings"]["before"]["level_s"] > 0
    assert document["kernels"][0]["rate"]["bytes_per_s"] > 0
