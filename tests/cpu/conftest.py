# SPDX-License-Identifier: Apache-2.0
"""The devices that tests of the CPU device's kernels run on: the fixture ``device``.

One for each instruction-set path of this machine, and NEON under qemu-user where this machine is no aarch64.
Tests that are too slow under emulation, or open devices by themselves, are marked ``native``.
"""

from __future__ import annotations

import platform

import pytest
from emulated_device import EmulatedDevice, missing_tools, open_emulated
from kernel_harness import isa_paths, open_device

from lily.device.device import Device

EMULATED = "neon under qemu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that needs ``device``, itself or through another fixture, once for each."""
    if "device" in metafunc.fixturenames:
        native = metafunc.definition.get_closest_marker("native") is not None
        emulated = [] if native or platform.machine().lower() in ("aarch64", "arm64") else [EMULATED]
        metafunc.parametrize("device", [*isa_paths(), *emulated], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device | EmulatedDevice:
    """An open device of two threads."""
    if request.param != EMULATED:
        return open_device(request.param)
    if missing_tools():
        pytest.skip(missing_tools())
    return open_emulated()
