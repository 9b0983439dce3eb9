# SPDX-License-Identifier: Apache-2.0
"""Plans that stop for the host (``Dispatch.host``): segments for the device, and what the host does between them.

Only the ablation ``resident-routing`` has such plans.  The host's kernels have the rows, the arguments and the bits
of the device's kernels of the same name.  Not handled: host steps in decode lists, of which two are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from lily.device.device import Buffer, CommandList, Device
from lily.plan.views import Dispatch, Plan
from lily.run._routing import route_group

HOST_KERNELS: dict[str, Callable[..., None]] = {"route_group": route_group}


class SegmentedList(CommandList):
    """A recorded plan with host steps. What is submitted is its last segment; ``run_ahead`` runs those before."""

    host_steps = True

    def __init__(self, device: Device, plan: Plan, buffers: Mapping[str, Buffer]) -> None:
        self.device, self.name, self.handle = device, plan.name, 0
        self._segments: list[CommandList] = []
        self._steps: list[Callable[[], None]] = []
        try:
            for segment, step in plan.segments():
                self._segments.append(device.record(segment, buffers))
                if step is not None:
                    self._steps.append(_bind(step, buffers))
        except BaseException:
            self.free()
            raise
        self.handle = self._segments[-1].handle

    def run_ahead(self) -> None:
        """Runs all segments but the last, the host's step after each. DeviceError: one failed; no later one has run."""
        for segment, step in zip(self._segments, self._steps, strict=False):
            self.device.wait(self.device.submit([segment]))
            step()

    def free(self) -> None:
        """Gives the lists back; none of their submissions may be unfinished."""
        for segment in self._segments:
            segment.free()
        self.handle = 0


def record(device: Device, plan: Plan, buffers: Mapping[str, Buffer]) -> CommandList:
    """Records ``plan`` with its buffer names bound to ``buffers``, in segments if it has host steps."""
    if any(d.host for d in plan.dispatches):
        return SegmentedList(device, plan, buffers)
    return device.record(plan, buffers)


def _bind(step: Dispatch, buffers: Mapping[str, Buffer]) -> Callable[[], None]:
    addresses = (buffers[v.buffer].address + v.offset for v in step.views)
    return partial(HOST_KERNELS[step.kernel.name], *addresses, *step.params)
