# SPDX-License-Identifier: Apache-2.0
"""The Metal shim's kernels: constants, limits, compilation from several threads, pipelines kept between runs.

It runs under GNUstep against the stand-in of tests/metal/.  Not handled: what kernels compute.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_harness import environment
from metal.shim import COPY, Open, Work, dispatch
from metal.standin import Kernel, Standin

from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.msl.flatten import constant_index


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


# ---- kernels ----
def capture_constants(metal: Standin) -> list[tuple[str, dict[int, int]]]:
    """Every function that is asked for, with its constants by index."""
    asked: list[tuple[str, dict[int, int]]] = []

    def compile(_: str, name: str, constants: dict[int, int]) -> Kernel:
        asked.append((name, constants))
        return Kernel()

    metal.run_kernels(compile)
    return asked


def test_every_constant_has_the_index_that_the_shaders_declare(metal: Standin, opened: Open) -> None:
    asked, index = capture_constants(metal), constant_index()
    device = opened()
    for kernel in KERNELS.values():
        device.kernel(kernel, range(100, 100 + len(kernel.constants)))
    wanted = [(k.name, {index[c]: 100 + i for i, c in enumerate(k.constants)}) for k in KERNELS.values()]
    assert asked == wanted


def test_a_kernel_is_made_once_for_each_set_of_constants(metal: Standin, opened: Open) -> None:
    asked = capture_constants(metal)
    device, gemv = opened(), KERNELS["gemv_norm"]
    a, b, again = (device.kernel(gemv, c) for c in ((4, 64), (8, 64), (4, 64)))
    assert a == again != b
    assert len(asked) == 2
    assert device.info["pipelines"] == 2


def test_an_unknown_kernel_and_wrong_constants_are_named(opened: Open) -> None:
    device = opened()
    with pytest.raises(DeviceError, match='no kernel "turbo" in the kernel table'):
        device.kernel(replace(COPY, name="turbo"))
    with pytest.raises(DeviceError, match=r"gemv_norm takes 2 constants \(bits group\), 1 were given"):
        device.kernel(KERNELS["gemv_norm"], [4])


def test_a_function_that_the_shaders_lack_is_named(metal: Standin, opened: Open) -> None:
    def compile(_: str, name: str, __: dict[int, int]) -> Kernel:
        raise AssertionError(f"no function {name}")

    metal.run_kernels(compile)
    with pytest.raises(DeviceError, match="give no kernel copy: no function copy"):
        opened().kernel(COPY)


LIMITS: dict[str, tuple[dict[str, float], str]] = {
    "no pipeline": ({"fail_pipeline": 1}, "no pipeline of kernel copy: made to fail"),
    "another simd width": ({"simd_width": 64}, "simdgroups of 64 threads; the shaders need 32"),
    "too much threadgroup memory": ({"static_memory": 40000}, "needs 40000 bytes of threadgroup memory.*has 32768"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_pipeline_beyond_the_gpus_limits_is_refused(case: str, metal: Standin, opened: Open) -> None:
    settings, message = LIMITS[case]
    metal.set(**settings)
    with pytest.raises(DeviceError, match=message):
        opened().kernel(COPY)


def test_a_pipeline_that_allows_too_few_threads_is_built_again_for_more(metal: Standin, work: Work) -> None:
    metal.set(pipeline_threads=256)
    for threads in (256, 512, 512):
        work.record(dispatch(threads=threads))
    assert (work.device.info["pipelines"], work.device.info["rebuilt"]) == (2, 1)
    work.device.wait(work.device.submit(work.lists))


def test_what_large_groups_need_can_be_compiled_before_anything_is_recorded(metal: Standin, work: Work) -> None:
    metal.set(pipeline_threads=256)
    work.device.kernel(COPY, threads=256)
    assert work.device.info["rebuilt"] == 0
    for threads in (512, 1024):
        work.device.kernel(COPY, threads=threads)
    before = work.device.info["pipelines"]
    work.record(*(dispatch(threads=n) for n in (256, 512, 1024)))
    assert (work.device.info["pipelines"], work.device.info["rebuilt"]) == (before, 2) == (3, 2)


def test_groups_that_no_pipeline_of_a_kernel_can_have_are_refused(metal: Standin, opened: Open) -> None:
    metal.set(pipeline_threads=256, most_threads=384)
    device = opened()
    with pytest.raises(DeviceError, match=r"copy cannot have 512 threads .* at most 256"):
        device.kernel(COPY, threads=512)
    with pytest.raises(DeviceError, match="copy: 33 x 1 x 1 threads in a group"):
        device.kernel(COPY, threads=33)


def test_different_kernels_are_compiled_at_the_same_time(metal: Standin, opened: Open) -> None:
    metal.set(compile_together=4, compile_us=200_000)
    device = opened()
    wanted = [k for k in KERNELS.values() if not k.constants][:4]
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(device.kernel, wanted))
    took = time.monotonic() - began
    assert device.info["compiled"] == 4
    assert 0.2 <= float(device.info["compile_s"]) <= took + 0.001, "what four threads do at a time counts once"


def test_a_kernel_that_many_threads_ask_for_is_compiled_once(metal: Standin, opened: Open) -> None:
    metal.set(compile_us=50_000, pipeline_threads=256)
    device = opened()
    with ThreadPoolExecutor(8) as pool:
        handles = set(pool.map(lambda _: device.kernel(COPY, threads=512), range(8)))
    assert len(handles) == 1
    assert (device.info["compiled"], device.info["rebuilt"]) == (2, 1)


def test_threads_that_wait_for_a_kernel_which_fails_are_each_told(metal: Standin, opened: Open) -> None:
    metal.set(compile_us=20_000, simd_width=64)
    device = opened()

    def message(_: int) -> str:
        with pytest.raises(DeviceError) as caught:
            device.kernel(COPY)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        messages = set(pool.map(message, range(4)))
    assert messages == {"metal device: kernel copy runs in simdgroups of 64 threads; the shaders need 32"}
    metal.set(simd_width=32)
    assert device.kernel(COPY), "nothing of the failure is left"


def test_more_threads_than_the_gpu_can_have_are_refused(metal: Standin, work: Work) -> None:
    metal.set(pipeline_threads=256, most_threads=384)
    with pytest.raises(DeviceError, match=r"copy cannot have 512 threads .* at most 256"):
        work.record(dispatch(threads=512))


# ---- the cache of pipelines ----
def test_pipelines_are_found_again_by_the_next_device(opened: Open, cache: Path) -> None:
    for hits in (0, 1):
        device = opened(cache=cache)
        device.kernel(COPY)
        info = device.info
        assert (info["cache"], info["cache_hits"], info["compiled"]) == ("on", hits, 1 - hits)
        device.close()
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_shaders_have_another_cache(opened: Open, cache: Path, shader_file: Path) -> None:
    for text in ("kernel void copy() {}", "kernel void copy() { }"):
        shader_file.write_text(text)
        device = opened(cache=cache)
        device.kernel(COPY)
        assert device.info["cache_hits"] == 0
        device.close()
    assert len(list(cache.iterdir())) == 2


def test_the_cache_takes_what_a_later_run_needs_as_well(opened: Open, cache: Path) -> None:
    for name, hits in (("copy", 0), ("last_row", 0), ("copy", 1), ("last_row", 1)):
        device = opened(cache=cache)
        device.kernel(KERNELS[name])
        assert device.info["cache_hits"] == hits, name
        device.close()


def test_another_build_of_the_system_has_another_cache(metal: Standin, opened: Open, cache: Path) -> None:
    for build in (74, 75):
        metal.set(build=build)
        device = opened(cache=cache)
        device.kernel(COPY)
        assert device.info["cache_hits"] == 0
        device.close()
    assert len(list(cache.iterdir())) == 2


def test_files_of_other_versions_are_removed_after_a_month(opened: Open, cache: Path) -> None:
    for name, days in (("pipelines-old", 40), ("pipelines-new", 20), ("notes", 40)):
        (cache / name).write_text("")
        os.utime(cache / name, (time.time() - days * 86400,) * 2)
    opened(cache=cache)
    assert {p.name for p in cache.iterdir()} == {"pipelines-new", "notes"}


def test_a_cache_that_others_can_read_is_not_used(opened: Open, cache: Path) -> None:
    cache.chmod(0o755)
    assert opened(cache=cache).info["cache"] == f"off: {cache} is open to other users (chmod 700)"


def test_without_an_option_the_cache_is_the_users(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "Library" / "Caches").mkdir(parents=True)
    libc: Any = ctypes.CDLL(None)
    with environment("HOME", str(tmp_path)):
        libc.setenv(b"HOME", str(tmp_path).encode(), 1)
        assert opened(cache=None).info["cache"] == "on"
        assert (tmp_path / "Library" / "Caches" / "lily").stat().st_mode & 0o777 == 0o700
        libc.setenv(b"HOME", b"/nowhere", 1)
        assert re.match("off: cannot create the folder", opened(cache=None).info["cache"])
        libc.unsetenv(b"HOME")
        assert opened(cache=None).info["cache"] == "off: HOME is not set"


def test_before_macos_15_4_there_is_a_cache_only_where_it_was_asked_for(
    metal: Standin, opened: Open, cache: Path
) -> None:
    metal.set(macos=15.3)
    assert opened(cache=None).info["cache"] == "off: macOS before 15.4"
    assert opened(cache=cache).info["cache"] == "on"


def test_a_file_in_place_of_the_cache_folder_is_told(opened: Open, cache: Path) -> None:
    (cache / "file").write_text("")
    assert opened(cache=cache / "file").info["cache"].endswith("is no folder")


@pytest.mark.parametrize(("how", "state"), [(1, "on"), (2, "off: made to fail"), (3, "off: made to fail"), (4, "on")])
def test_a_cache_that_fails_costs_only_time(how: int, state: str, metal: Standin, opened: Open, cache: Path) -> None:
    first = opened(cache=cache)
    first.kernel(COPY)
    first.close()
    metal.set(fail_archive=how)
    device = opened(cache=cache)
    device.kernel(KERNELS["last_row"])
    assert device.info["cache"] == state
    device.close()
    assert not [p for p in cache.iterdir() if "." in p.name], "a partial file was left"
