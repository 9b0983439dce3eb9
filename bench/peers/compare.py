# SPDX-License-Identifier: Apache-2.0
"""Lily against llama.cpp and against a plain read loop, in alternation on one machine.

Every engine loads once and then takes turns, round by round, so that a drift of the machine's speed meets all alike.
Prints each figure's median with its range, and the ratios taken round by round.

    python bench/peers/compare.py --lily DIR --llama FILE.gguf --llama-python OTHER_VENV/bin/python --rounds 7
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from cpu_kernels import native_library  # noqa: E402


class Worker:
    """A process that answers one line with one line of JSON."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.hello = self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args} ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, request: object) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()


def minimum_bytes(model: Path, context: int) -> int:
    """Bytes that one decoded token must read and write, from the plan of the model."""
    from lily.checkpoint.config import ModelConfig
    from lily.plan.report import plan_report
    from lily.policy import policy_for

    config = ModelConfig.from_file(model / "config.json")
    return plan_report(config, policy_for("cpu"), phase="decode", context=context)["minimum_bytes"]


class ReadLimit:
    """The plain read loop of bench/read_loop.c over memory in huge pages, as decode reads its weights."""

    def __init__(self, threads: int, nbytes: int = 1 << 30) -> None:
        self.library, self.threads, self.nbytes = native_library(), threads, nbytes
        self.memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.bytes[:] = 1

    def gigabytes_per_second(self) -> float:
        """The best of three passes."""
        seen, address = ctypes.c_uint64(), self.bytes.ctypes.data
        passes = [self.library.bench_read(address, self.nbytes, self.threads, ctypes.byref(seen)) for _ in range(3)]
        return self.nbytes / min(passes) / 1e9


def line(name: str, values: list[float], unit: str) -> str:
    return f"{name:34} {statistics.median(values):9.2f} {unit:6} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lily", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--llama", type=Path, help="GGUF of the same shapes")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    per_token = minimum_bytes(a.lily, a.prompt + a.steps // 2)
    reader = ReadLimit(a.threads)
    engines = {"lily": Worker([sys.executable, str(HERE / "lily_worker.py"), str(a.lily), str(a.threads)])}
    if a.llama:
        engines["llama"] = Worker([a.llama_python, str(HERE / "llama_worker.py"), str(a.llama), str(a.threads)])
    for name, worker in engines.items():
        print(f"{name}: {worker.hello['version']}, {worker.hello['ready']}")
    found: dict[str, list[float]] = {}
    for round_number in range(a.rounds + 1):
        results = {"read limit": reader.gigabytes_per_second()}
        for name, worker in engines.items():
            answer = worker.ask([a.prompt, a.steps])
            results |= {f"{name} {phase}": answer[phase] for phase in ("prefill", "decode")}
        if round_number:  # the first one warms up
            for name, value in results.items():
                found.setdefault(name, []).append(value)
    limit = [x * 1e9 / per_token for x in found["read limit"]]
    print(f"{a.rounds} rounds, prompt of {a.prompt}, {a.steps} steps; {per_token / 1e6:.1f} MB a decoded token")
    print(line("read limit", found["read limit"], "GB/s"))
    print(line("decode at the read limit", limit, "tok/s"))
    for name in found:
        if name != "read limit":
            print(line(name, found[name], "tok/s"))
    ratios = {"lily decode / read limit": [x / y for x, y in zip(found["lily decode"], limit, strict=True)]}
    if a.llama:
        for phase in ("prefill", "decode"):
            pairs = zip(found[f"lily {phase}"], found[f"llama {phase}"], strict=True)
            ratios[f"lily {phase} / llama {phase}"] = [x / y for x, y in pairs]
    for name, values in ratios.items():
        print(line(name, values, ""))


main()
