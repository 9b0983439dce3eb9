# SPDX-License-Identifier: Apache-2.0
"""Tensor operations are used only where they compute the right thing: a check when the device opens.

They are new, differ from one macOS to the next, and a wrong product would not be noticed in a reply.  The kernels that
multiply with them run once with each tile, at small shapes of several tiles, against the cpu device.  If one differs,
the device is opened again without them, which is said in its ``info``.
Not handled: everything else (``lily doctor`` checks every kernel).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from lily.checks.cases import SMALL, Size, cases, reference_policy
from lily.checks.check import check
from lily.checks.runs import Rig
from lily.device.device import Device, open_device
from lily.device.pipelines import compile_pipelines, pipelines_of
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.policy import policy_for

# Attention uses tensor operations at head size 256.
_SIZE = Size(
    "tensor", replace(SMALL, head_dim=256, rotary_dim=64), context=300, rows=93, bucket=128, copied=1 << 16, tiled=256
)
CHECKED = frozenset(name for name, kernel in KERNELS.items() if kernel.matrix and not kernel.ablation)


def open_checked(name: str, **options: Any) -> Device:
    """Opens a device as ``open_device`` does, without tensor operations if they compute something else here."""
    device = open_device(name, **options)
    if device.info.get("matrix") != "tensor":
        return device
    rig = Rig(lambda: device, policy_for(device.name))
    try:
        fault = tensor_fault(rig)
    except BaseException:
        rig.close()
        raise
    if fault:
        rig.close()
        device = open_device(name, **(options | {"msl": "3.2"}))
    device.notes["tensor_check"] = f"failed, simdgroup_matrix is used: {fault}" if fault else "passed"
    return device


def tensor_fault(tested: Rig) -> str:
    """The first kernel with another result than the cpu device's, and how it differs; empty if there is none."""
    reference = Rig(lambda: Device("cpu", threads=1), reference_policy(tested.policy))
    chosen = [case for case in cases(tested.policy.device, _SIZE) if case.kernel in CHECKED]
    try:
        with suppress(DeviceError):  # the check of that kernel reports it
            compile_pipelines(tested.device, pipelines_of(case.tested for case in chosen))
        for case in chosen:
            result = check(case, tested, reference)
            if result.status != "pass":
                return f"{case.name}: {result.text or result.status}"
    finally:
        reference.close()
    return ""
