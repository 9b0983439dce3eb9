# SPDX-License-Identifier: Apache-2.0
"""Kernels may be asked for by several threads at once, on the cpu device too.

Not handled: the Metal shim, which compiles them (test_metal_shim_kernels.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from lily.device.device import Device
from lily.kernels import KERNELS

THREADS = 8


def test_threads_that_ask_for_the_same_kernels_get_the_same_ones() -> None:
    wanted = [k for k in KERNELS.values() if not k.constants]
    for _ in range(20):
        with Device("cpu", threads=1) as device, ThreadPoolExecutor(THREADS) as pool:
            start = Barrier(THREADS)

            def ask(_: int, device: Device = device, start: Barrier = start) -> list[int]:
                start.wait()
                return [device.kernel(kernel, threads=32) for kernel in wanted]

            first, *others = pool.map(ask, range(THREADS))
            assert all(other == first for other in others)
            assert len(set(first)) == len(wanted)
