# SPDX-License-Identifier: Apache-2.0
"""What ``lily doctor`` advises; it depends on the instruction set that the cpu device has chosen."""

from __future__ import annotations

from lily.device.device import Device


def instead() -> str:
    """Until a fault of the cpu device is mended; the portable path has nothing to fall back to."""
    with Device("cpu") as cpu:
        portable = cpu.info["isa"] == "portable"
    return "send this report" if portable else "set LILY_CPU=portable, and send this report"
