# SPDX-License-Identifier: Apache-2.0
"""Tensor operations are used only where they compute the right thing: a check when the device opens.

They are new, differ from one macOS to the next, and a wrong product would not be noticed in a reply.  The kernels that
multiply with them run once at small shapes of several tiles, against the cpu device.  If one differs, the device is
opened again without them, which is said in its ``info``.
Not handled: everything else (``lily doctor`` checks every kernel).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lily.device import Device, open_device
from lily.doctor.cases import SMALL, Size, cases, reference_policy
from lily.doctor.check import check
from lily.doctor.runs import Bench
from lily.policy import policy_for

# Attention uses tensor operations at head size 256.
_SIZE = Size(
    "tensor", replace(SMALL, head_dim=256, rotary_dim=64), context=300, rows=93, bucket=128, copied=1 << 16
)  # fmt: skip
CHECKED = ("gemm", "gemm_swiglu", "moe_gemm_gate_up", "moe_gemm_down", "attn_prefill")


def open_checked(name: str, **options: Any) -> Device:
    """Opens a device as ``open_device`` does, without tensor operations if they compute something else here."""
    device = open_device(name, **options)
    if device.info.get("matrix") != "tensor":
        return device
    try:
        fault = tensor_fault(device)
    except BaseException:
        device.close()
        raise
    if fault:
        device.close()
        device = open_device(name, **(options | {"msl": "3.2"}))
    device.notes["tensor_check"] = f"failed, simdgroup_matrix is used: {fault}" if fault else "passed"
    return device


def tensor_fault(device: Device) -> str:
    """The first kernel with another result than the cpu device's, and how it differs; empty if there is none."""
    policy = policy_for(device.name)
    tested = Bench(lambda: device, policy)
    reference = Bench(lambda: Device("cpu", threads=1), reference_policy(policy))
    try:
        for case in cases(device.name, _SIZE)[0]:
            if case.kernel in CHECKED:
                result = check(case, tested, reference)
                if result.status != "pass":
                    return f"{case.name}: {result.text or result.status}"
    finally:
        reference.close()
    return ""
