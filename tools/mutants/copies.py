# SPDX-License-Identifier: Apache-2.0
"""Copies of the checkout in which faults are planted. They stay, below build/, so that their caches stay warm.

Not handled: a checkout without git, whose list of files is used; two runs at once in the same copy.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.change import ROOT, Fault

HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "mutants"
# What a build makes, and a fault in a compiled source therefore changes.
_BUILT = ("build/temp*/**/*", "build/lib*/**/*", "build/cython/**/*", "lily/**/*.so", "lily/**/kernel_params.h")
_DOWNLOADED = ("build/metal/wheels", "build/metal/metal_cpp")
_BUILD_SECONDS = 600


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``code`` is None where it ran out of time."""

    code: int | None
    output: str
    seconds: float


class Copy:
    """One copy; ``number`` tells them apart."""

    def __init__(self, number: int) -> None:
        self.path = FOLDER / f"copy-{number}"
        self._good = FOLDER / f"built-{number}"
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        self._paths = ""  # instruction sets of the cpu device that faults are compiled for

    def prepare(self) -> str:
        """Brings it to the state of the checkout and builds it; returns "", or what went wrong."""
        self._take_over()
        problem = self._build()
        if problem:
            return problem
        shutil.rmtree(self._good, ignore_errors=True)
        for file in self._built():
            _copy(file, self._good / file.relative_to(self.path))
        ask = "import lily; from lily.device.device import Device as D; print(lily.__file__, D('cpu').info['isa'])"
        where, _, path = self.run([sys.executable, "-c", ask], 60).output.strip().rpartition(" ")
        self._paths = f"portable,{path}"
        return "" if where.startswith(str(self.path)) else f"{where} is imported instead of {self.path}/lily"

    def _build(self, paths: str = "") -> str:
        """Builds it; returns "", or the compiler's words. ``paths``: instruction sets to compile for; "": all."""
        compiler = shlex.join([sys.executable, str(HERE / "cc.py"), *shlex.split(os.environ.get("CC", "cc"))])
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = self.run(command, _BUILD_SECONDS, {"CC": compiler, "MUTANTS_PATHS": paths})
        return done.output if done.code else ""

    def _take_over(self) -> None:
        """Copies what git knows or would take, where it differs, and removes what it does not know any more."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        names = [name for name in listed if name and (ROOT / name).is_file()]
        manifest = FOLDER / f"{self.path.name}.json"
        before = json.loads(manifest.read_text()) if manifest.exists() else []
        for name in set(before) - set(names):
            (self.path / name).unlink(missing_ok=True)
        for name in names:
            source, target = ROOT / name, self.path / name
            if not target.is_file() or source.read_bytes() != target.read_bytes():
                _copy(source, target)
                os.utime(target)  # newer than what was built of it, which may be that of a fault left by a killed run
        for name in _DOWNLOADED:
            if (ROOT / name).is_dir() and not (self.path / name).exists():
                shutil.copytree(ROOT / name, self.path / name)
        manifest.write_text(json.dumps(names))

    def _built(self) -> Iterator[Path]:
        for pattern in _BUILT:
            yield from (file for file in self.path.glob(pattern) if file.is_file())

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[str]:
        """The copy with ``fault``, built where that needs it; gives "", or the compiler's words. All is put back."""
        file = self.path / fault.change.file
        text, times = file.read_bytes().decode(), file.stat()
        compiled = _is_compiled(fault.change.file)
        try:
            file.write_bytes(fault.change.applied(text).encode())
            problem = ""
            if fault.change.file.endswith(".py"):
                problem = _syntax_error(file)
            elif compiled:
                problem = self._build(self._paths)
            yield problem
        finally:
            # Old times again, or the next build would compile everything; so what was built has to come back as well.
            file.write_bytes(text.encode())
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if compiled:
                for built in [path for path in self._good.rglob("*") if path.is_file()]:
                    _copy(built, self.path / built.relative_to(self._good))

    def run(self, command: Sequence[str], seconds: float, variables: dict[str, str] | None = None) -> Outcome:
        """Runs a command in the copy with the copy's package; all that it started ends with it."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LILY_", "PYTEST_"))}
        environment |= {k: v for k, v in os.environ.items() if k == "LILY_TEST_DATA"}
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        environment |= {"PYTHONPATH": path, "PYTHONHASHSEED": "0", **(variables or {})}
        began = time.monotonic()
        process = self._running = subprocess.Popen(
            command, cwd=self.path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        if self._stopped:
            self.stop()
        try:
            output, _ = process.communicate(timeout=seconds)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return Outcome(code, output, time.monotonic() - began)

    def stop(self) -> None:
        """Ends what runs in the copy, and all that would be started after it; for another thread."""
        self._stopped = True
        process = self._running
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    shutil.copy2(source, part)
    part.replace(target)


def _is_compiled(file: str) -> bool:
    """Whether a change of ``file`` needs a build. Shaders and the shim are compiled by the tests that run them.

    But for what the shim shares with the cpu device: its C files and their header.
    """
    if file.startswith(("shaders/", "lily/msl/")):
        return False
    if file.startswith("objc_shim/"):
        return file.endswith((".c", "/device_common.h"))
    return file.endswith((".c", ".h", ".pyx")) or file == "lily/kernels.py"


def _syntax_error(file: Path) -> str:
    try:
        compile(file.read_bytes(), str(file), "exec")
    except SyntaxError as error:
        return str(error)
    return ""
