# SPDX-License-Identifier: Apache-2.0
"""The kernel tests once more on the NEON path, under qemu-user where this machine is no aarch64.

What is tested is written in the test files of the kernels; this file gives their functions an emulated device.
Left out: what is too slow under emulation or opens devices by itself.
"""

from __future__ import annotations

import platform
from types import ModuleType

import pytest
import test_cpu_attention
import test_cpu_gdn
import test_cpu_matmul
import test_cpu_moe
import test_cpu_norm
import test_cpu_route
import test_cpu_sample
import test_cpu_sample_filter
from emulated_device import EmulatedDevice, missing_tools, open_emulated

MODULES = (
    test_cpu_matmul,
    test_cpu_moe,
    test_cpu_norm,
    test_cpu_route,
    test_cpu_gdn,
    test_cpu_attention,
    test_cpu_sample,
    test_cpu_sample_filter,
)
LEFT_OUT = (
    "threads",
    "prefill_follows_the_formulas",
    "depend_on_the_tile__attention",
    "noise_is_accurate",
)


@pytest.fixture(scope="module")
def device() -> EmulatedDevice:
    if platform.machine().lower() in ("aarch64", "arm64"):
        pytest.skip("this machine runs the NEON path itself")
    if missing_tools():
        pytest.skip(missing_tools())
    return open_emulated()


def _borrow(module: ModuleType) -> None:
    """Tests of `module` that run kernels, under this module's `device`."""
    for name, value in vars(module).items():
        given = set(getattr(value, "__annotations__", ()))
        if name.startswith("test_") and callable(value) and given & {"device", "run_call"}:
            name = f"{name}__{module.__name__.removeprefix('test_')}"
            if not any(word in name for word in LEFT_OUT):
                globals()[name] = value


for _module in MODULES:
    _borrow(_module)

rng = test_cpu_matmul.rng
run_call, slack = test_cpu_sample.run_call, test_cpu_sample.slack
