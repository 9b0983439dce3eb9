# SPDX-License-Identifier: Apache-2.0
"""The Metal shim is opened: GPU, system, shaders and options.

It runs under GNUstep against the stand-in of tests/metal/.  Not handled: what kernels compute.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_harness import environment
from metal.shim import COPY, Open
from metal.standin import Kernel, Standin

from lily.errors import DeviceError


# ---- opening ----
def test_shaders_are_compiled_as_msl_3_2_with_relaxed_math_and_precise_functions(metal: Standin, opened: Open) -> None:
    opened()
    (line,) = (x for x in metal.journal if x.startswith("compile"))
    assert line.endswith("version 30002, math mode 1, functions 1")


def test_the_language_version_can_be_chosen(metal: Standin, opened: Open) -> None:
    assert str(opened(msl="4.0").info["msl"]) == "4.0"
    assert any("version 40000" in x for x in metal.journal)


MATRIX = {
    "M1": ({"family": 7}, "3.2", "simdgroup float"),
    "M2": ({"family": 8}, "3.2", "simdgroup float"),
    "M3": ({"family": 9, "macos": 26.4}, "3.2", "simdgroup bfloat"),
    "M5 before macOS 26.2": ({"family": 10, "macos": 26.1}, "3.2", "simdgroup bfloat"),
    "M5": ({"family": 10, "macos": 26.2}, "4.0", "tensor"),
    "M5 under a system that calls itself 16": ({"family": 10, "macos": 16.2}, "4.0", "tensor"),
    "M5 whose compiler refuses": (
        {"family": 10, "macos": 26.2, "fail_compile": 4}, "3.2",
        "simdgroup bfloat, no tensor operations: Metal does not compile the shaders (MSL 4.0): program_source:2:3: "),
    "M5 whose probe fails": (
        {"family": 10, "macos": 26.2, "fail_pipeline": 1}, "3.2",
        "simdgroup bfloat, no tensor operations: Metal makes no pipeline of kernel gemm: made to fail"),
}  # fmt: skip


@pytest.mark.parametrize("case", MATRIX)
def test_the_matrix_units_are_chosen_by_family_system_and_a_probe(case: str, metal: Standin, opened: Open) -> None:
    settings, language, matrix = MATRIX[case]
    metal.set(**settings)
    sources, made = [], []

    def compile(source: str, name: str, constants: dict[int, int]) -> Kernel:
        sources.append(source)
        made.append((name, sorted(constants.values())))
        return Kernel()

    metal.run_kernels(compile)
    device = opened()
    info = device.info
    assert str(info["msl"]) == language
    assert str(info["matrix"]).startswith(matrix)
    device.kernel(COPY)
    assert ("LILY_MATRIX_F32" in sources[-1]) == (matrix == "simdgroup float")
    assert device.info["pipelines"] == 1, "the probe's does not count"
    if matrix == "tensor":
        assert made == [("gemm", [4, 64, 64]), ("copy", [])]


def test_info_tells_chip_family_memory_and_choices(metal: Standin, opened: Open) -> None:
    metal.set(family=8, working_set=23e9, max_buffer=9e9)
    info = opened().info
    assert (info["name"], info["chip"], info["family"]) == ("metal", "Stand-in M0", "apple8")
    assert (info["memory"], info["max_buffer"]) == (23000000000, 9000000000)
    assert (info["shaders"], info["residency"], info["cache"]) == ("source", "off", "off")


def test_a_compiled_library_is_preferred_to_the_source(metal: Standin, opened: Open, tmp_path: Path) -> None:
    (tmp_path / "lily.metallib").write_text("MTLB")
    assert opened(metallib=tmp_path / "lily.metallib").info["shaders"] == "metallib"
    assert [x for x in metal.journal if x.startswith(("load", "compile"))] == [f"load {tmp_path / 'lily.metallib'}"]


PRECOMPILED = {
    "M1": ({"family": 7}, "lily-3.2-f32.metallib"),
    "M3": ({"family": 9, "macos": 26.4}, "lily-3.2.metallib"),
    "M5 before macOS 26.2": ({"family": 10, "macos": 26.1}, "lily-3.2.metallib"),
    "M5": ({"family": 10, "macos": 26.2}, "lily-4.0.metallib"),
    "M5 whose probe fails": ({"family": 10, "macos": 26.2, "fail_pipeline": 1}, "lily-3.2.metallib"),
}


@pytest.mark.parametrize("case", PRECOMPILED)
def test_of_a_folder_of_compiled_libraries_the_one_for_this_gpu_is_taken(
    case: str, metal: Standin, opened: Open, tmp_path: Path
) -> None:
    settings, expected = PRECOMPILED[case]
    for name in ("lily-3.2.metallib", "lily-3.2-f32.metallib", "lily-4.0.metallib"):
        (tmp_path / name).write_text("MTLB")
    metal.set(**settings)
    info = opened(metallib=tmp_path).info
    assert info["shaders"] == "metallib"
    assert str(info["msl"]) in expected
    loaded = [x for x in metal.journal if x.startswith(("load", "compile"))]
    assert loaded[-1] == f"load {tmp_path / expected}"


def test_a_folder_without_the_library_for_this_gpu_leaves_it_to_the_source(
    metal: Standin, opened: Open, tmp_path: Path
) -> None:
    (tmp_path / "lily-3.2.metallib").write_text("MTLB")
    metal.set(family=8)
    assert opened(metallib=tmp_path).info["shaders"] == "source"
    with pytest.raises(DeviceError, match=r"has no library for this GPU \(MSL 3\.2, float\), and no source"):
        opened(metallib=tmp_path, source=None)


def test_a_metallib_that_is_not_there_is_an_error(opened: Open) -> None:
    with pytest.raises(DeviceError, match="the shader library /nowhere cannot be read: No such file"):
        opened(metallib="/nowhere")


# What is set, what is then told.
REFUSALS: dict[str, tuple[dict[str, float], str]] = {
    "no GPU": ({"no_default": 1, "no_devices": 1}, "Metal finds no GPU.*--device cpu"),
    "an old macOS": ({"macos": 14.7}, "needs macOS 15 or later, this is 14.7; use --device cpu"),
    "a system without a version": ({"macos": 0}, r"this is 0\.0"),
    "an old family": ({"family": 6}, r"Apple GPU family 6; .* needs 7 \(M1\)"),
    "separate memory": ({"unified": 0}, "unified memory"),
    "no queue": ({"fail_queue": 1}, "gave no command queue"),
    "shaders that do not compile": ({"fail_compile": 1}, r"not compile the shaders \(MSL 3\.2\): program_source:2:3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_opening_fails_with_cause_and_remedy(case: str, metal: Standin, opened: Open) -> None:
    settings, message = REFUSALS[case]
    metal.set(**settings)
    with pytest.raises(DeviceError, match=message):
        opened(keep_s=1)


def test_without_a_residency_set_memory_is_not_asked_for_ahead(metal: Standin, opened: Open) -> None:
    metal.set(fail_set=1)
    assert opened(keep_s=1).info["residency"] == "off"
    with pytest.raises(DeviceError, match="no residency set: made to fail"):
        opened(keep_s=1, replay="icb")


def test_a_gpu_that_is_only_in_the_list_of_devices_is_found(metal: Standin, opened: Open) -> None:
    metal.set(no_default=1)
    assert opened().info["chip"] == "Stand-in M0"


OPTIONS = {
    "no shaders": ({"source": None}, "option source=FILE"),
    "an unknown key": ({"threads": 3}, r'unknown option "threads"; the metal device knows source, metallib'),
    "a number that is none": ({"slice_ms": "soon"}, r'slice_ms is "soon"; allowed: 0 to 600000'),
    "a number that is too large": ({"slice_ms": 600001}, "allowed: 0 to 600000"),
    "an empty value": ({"msl": ""}, "value of 0 characters"),
    "a language that is none": ({"msl": "three"}, r'msl is "three"; allowed: auto, or 3\.2 and later'),
    "a way of replaying that is none": ({"replay": "twice"}, 'replay is "twice"; allowed: encode, icb'),
    "a source that is missing": ({"source": "/nowhere/x.metal"}, "/nowhere/x.metal cannot be read"),
    "a path that is too long": ({"cache": "/" + "x" * 1024}, "value of 1025 characters"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_named(case: str, opened: Open) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(DeviceError, match=message):
        opened(**options)


def test_a_source_that_is_no_text_is_refused(opened: Open, shader_file: Path) -> None:
    shader_file.write_bytes(b"\xff\xfe")
    with pytest.raises(DeviceError, match="no UTF-8 text"):
        opened()


def test_a_metallib_that_does_not_load_says_what_to_do(metal: Standin, opened: Open, tmp_path: Path) -> None:
    metal.set(fail_metallib=1)
    (tmp_path / "lib").write_text("MTLB")
    with pytest.raises(DeviceError, match=r"lib cannot be loaded \(made to fail\); delete it"):
        opened(metallib=tmp_path / "lib")


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_the_watchdog_is_relaxed_before_metal_starts_unless_the_user_chose(
    before: str | None, after: str, metal: Standin, opened: Open
) -> None:
    name = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
    with environment(name, before):
        # Metal reads the C library's environment, which Python's view does not follow.
        opened()
        assert metal.journal[0] == f"device {name}={after}"
        os.unsetenv(name)
