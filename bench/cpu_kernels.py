# SPDX-License-Identifier: Apache-2.0
"""Matrix kernels of the CPU device beside what the machine can do: a plain read loop, and its multiply-add rate.

    python bench/cpu_kernels.py [--threads N] [--isa NAME] [--rounds N] [--megabytes N]

Decode kernels run over so many matrices that weights come from memory, and the read loop reads the same memory;
both alternate and the median of the rounds counts.  Prefill kernels are given as a share of the multiply-accumulates
that the same threads reach with registers only.
Not handled: attention, GDN and sampling kernels; end-to-end rates.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lily.device.device import Buffer, Device
from lily.kernels import KERNELS
from lily.plan.views import Dispatch, Plan, View

GROUP = 64
Call = tuple[str, dict[str, View], dict[str, float], dict[str, int], tuple[int, ...]]


def native_library() -> Any:
    """bench/read_loop.c, compiled for this machine."""
    source = Path(__file__).with_name("read_loop.c")
    target = Path(tempfile.mkdtemp()) / "read_loop.so"
    tune = "-mcpu=native" if os.uname().machine in ("arm64", "aarch64") else "-march=native"
    command = [*shlex.split(os.environ.get("CC", "cc")), "-O3", tune, "-shared", "-fPIC", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.bench_read.restype = library.bench_peak.restype = ctypes.c_double
    library.bench_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
    return library


def matrix_bytes(n: int, k: int, bits: int = 4) -> int:
    return -(-n // 16) * (k // GROUP) * (2 * GROUP * bits + 64)


class Bench:
    def __init__(self, device: Device, megabytes: int) -> None:
        self.device = device
        self.small = device.buffer(64 << 20)  # activations: zeros do
        self.weights = device.buffer(megabytes << 20)
        rng = np.random.default_rng(0)
        words = self.weights.array(np.uint32)
        words[:] = np.resize(rng.integers(0, 1 << 32, 1 << 20, np.uint32), words.shape) & np.uint32(0x3FFF3FFF)

    def record(self, calls: list[Call]) -> Any:
        dispatches = []
        for kernel, views, params, constants, grid in calls:
            table = KERNELS[kernel]
            values = tuple(constants[c] for c in table.constants), tuple(views[a.name] for a in table.args)
            scalars = tuple(params[p] for p, _ in table.params)
            dispatches.append(Dispatch(table, kernel, *values, scalars, (*grid, 1, 1)[:3], (1, 1, 1), barrier=True))
        buffers: dict[str, Buffer] = {"small": self.small, "weights": self.weights}
        return self.device.record(Plan("bench", tuple(dispatches), 0), buffers)

    def seconds(self, recorded: Any) -> float:
        ticket = self.device.submit([recorded])
        self.device.wait(ticket)
        return self.device.seconds(ticket)

    def view(self, at: int, nbytes: int) -> View:
        return View("small", at, nbytes)


def gemv_list(b: Bench, n: int, k: int) -> tuple[Any, int]:
    """gemv_norm over as many matrices as fit; (list, bytes read)."""
    size = matrix_bytes(n, k)
    calls = []
    for at in range(0, b.weights.nbytes - size + 1, size):
        views = {"x": b.view(0, 4 * k), "norm": b.view(1 << 16, 4 * k), "y": b.view(1 << 20, 4 * n)}
        views["w"] = View("weights", at, size)
        params = {"n": n, "k": k, "eps": 1e-6, "rows_per_group": 16}
        calls.append(("gemv_norm", views, params, {"bits": 4, "group": GROUP}, (-(-n // 16),)))
    return b.record(calls), size * len(calls)


def moe_lists(b: Bench, h: int, n: int, experts: int, active: int) -> tuple[Any, int]:
    """moe_gate_up and moe_down of different random experts; (list, bytes read)."""
    rng = np.random.default_rng(1)
    one = 2 * matrix_bytes(n, h) + matrix_bytes(h, n)
    stacks = b.weights.nbytes // (experts * one)
    assert stacks, f"--megabytes must be {-(-experts * one >> 20)} or more"
    calls = []
    logits = b.small.array(np.float32)
    for i in range(32):
        at = (8 << 20) + i * 4096
        logits[at // 4 : at // 4 + experts + 1] = rng.normal(size=experts + 1)
        base = i % stacks * experts * one
        small = {
            "x": b.view(0, 4 * h), "norm": b.view(1 << 16, 4 * h), "logits": b.view(at, 4 * (experts + 1)),
            "act": b.view(1 << 20, 4 * n * active), "ids": b.view(2 << 20, 4 * active),
            "weights": b.view(3 << 20, 4 * active), "shared": b.view(4 << 20, 4 * n),
            "w_shared": b.view(32 << 20, matrix_bytes(h, n)),
        }  # fmt: skip
        params = {"eps": 1e-6, "experts": experts, "active": active, "renorm": 1, "rows_per_group": 16}
        up = {**small, "w": View("weights", base, experts * 2 * matrix_bytes(n, h))}
        constants = {"bits": 4, "group": GROUP}
        calls.append(("moe_gate_up", up, {**params, "n": n, "k": h}, constants, (-(-n // 16), active)))
        down = {**small, "w": View("weights", base + experts * 2 * matrix_bytes(n, h), experts * matrix_bytes(h, n))}
        constants = {**constants, "shared_bits": 4, "shared_group": GROUP}
        calls.append(("moe_down", down, {**params, "n": h, "k": n, "ks": n}, constants, (-(-h // 16),)))
    # The shared expert's matrix is the same 32 times, so it counts as cached.
    return b.record(calls), 32 * active * one


def gemm_list(b: Bench, rows: int, n: int, k: int) -> tuple[Any, int]:
    """One gemm; (list, multiply-accumulates)."""
    b.small.array(np.int32)[:4] = 0, rows, 0, 0
    views = {
        "step": b.view(0, 16), "x": b.view(1 << 12, 4 * rows * k), "y": b.view(16 << 20, 4 * rows * n),
        "w": View("weights", 0, matrix_bytes(n, k)),
    }  # fmt: skip
    params = {"n": n, "k": k, "pitch": n, "column": 0, "tile_n": 16}
    constants = {"bits": 4, "group": GROUP, "tile_m": 512}
    return b.record([("gemm", views, params, constants, (-(-n // 16), 1))]), rows * n * k


def moe_gemm_list(b: Bench, rows: int, h: int, n: int, experts: int, active: int, tile: int) -> tuple[Any, int]:
    """route_group and both grouped products; (list, multiply-accumulates)."""
    small = b.small
    rng = np.random.default_rng(2)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :active].astype(np.int32)
    small.array(np.int32)[:4] = 0, rows, 0, 0
    small.array(np.int32)[1 << 10 : (1 << 10) + ids.size] = ids.reshape(-1)
    tiles = rows * active // tile + experts
    views = {
        "step": b.view(0, 16), "ids": b.view(1 << 12, 4 * ids.size), "offsets": b.view(1 << 18, 4 * (experts + 1)),
        "order": b.view(1 << 19, 4 * ids.size), "blocks": b.view(1 << 20, 8 * tiles),
    }  # fmt: skip
    sizes = {"experts": experts, "active": active, "tile_m": tile, "tile_n": 16, "max_blocks": tiles}
    gate, down = matrix_bytes(n, h) * 2 * experts, matrix_bytes(h, n) * experts
    x, act, y = b.view(2 << 20, 4 * rows * h), b.view(8 << 20, 4 * ids.size * n), b.view(20 << 20, 4 * ids.size * h)
    up_views = {**views, "x": x, "w": View("weights", 0, gate), "y": act}
    down_views = {**views, "x": act, "w": View("weights", gate, down), "y": y}
    c = {"bits": 4, "group": GROUP, "tile_m": tile}
    calls: list[Any] = [
        ("route_group", views, sizes, {}, (1,)),
        ("moe_gemm_gate_up", up_views, {"n": n, "k": h, **sizes}, c, (-(-n // 16), tiles)),
        ("moe_gemm_down", down_views, {"n": h, "k": n, **sizes}, c, (-(-h // 16), tiles)),
    ]
    return b.record(calls), ids.size * 3 * n * h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=1024)
    arguments = parser.parse_args()
    native = native_library()
    with Device("cpu", threads=arguments.threads, isa=arguments.isa) as device:
        threads = int(device.info["threads"])
        print(f"isa {device.info['isa']}, {threads} threads")
        b = Bench(device, arguments.megabytes)
        seen = ctypes.c_uint64()
        for name, (recorded, count) in {
            "gemv [12352,2048]": gemv_list(b, 12352, 2048),
            "gemv [2048,4096]": gemv_list(b, 2048, 4096),
            "experts 8 of 256": moe_lists(b, 2048, 512, 256, 8),
        }.items():
            rates, limits = [], []
            for _ in range(arguments.rounds):
                rates.append(count / b.seconds(recorded))
                time = native.bench_read(b.weights.address, b.weights.nbytes, threads, ctypes.byref(seen))
                limits.append(b.weights.nbytes / time)
            rate, limit = statistics.median(rates), statistics.median(limits)
            print(f"{name:28s} {rate / 1e9:6.1f} GB/s, read loop {limit / 1e9:6.1f} GB/s: {rate / limit:6.1%}")
        b.small.bytes[:] = 0
        for name, (recorded, count) in {
            "gemm 512 x [4096,2048]": gemm_list(b, 512, 4096, 2048),
            "experts 512 rows, tile 32": moe_gemm_list(b, 512, 2048, 512, 256, 8, 32),
        }.items():
            rates, limits = [], []
            for _ in range(arguments.rounds):
                rates.append(count / b.seconds(recorded))
                limits.append(native.bench_peak(threads))
            rate, limit = statistics.median(rates), statistics.median(limits)
            print(f"{name:28s} {rate / 1e9:6.1f} GMAC/s, peak {limit / 1e9:6.1f} GMAC/s: {rate / limit:6.1%}")


if __name__ == "__main__":
    main()
