# SPDX-License-Identifier: Apache-2.0
"""The Metal shaders as a device of Lily: plans and whole models run through them on the emulator.

    with EmulatedMetal(order="random", checked=True) as device: ...        # a lily.device.device.Device
    with emulated_engine(model, order="reverse", late=True) as engine: ... # an Engine on it

What the checks find makes the submission fail (DeviceError).  In reverse and random order, dispatches that the plan
leaves without a barrier change places.  Not handled: speed; two of these devices open at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from msl_build import kernel_library, located, runtime, runtime_path

from lily.device.device import Buffer, CommandList, Device
from lily.engine import Engine
from lily.errors import DeviceError
from lily.kernels import KERNELS
from lily.msl.flatten import constant_name
from lily.plan.views import Plan
from lily.policy import POLICIES

MAX_ARGS = 20


class _Provided(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p), ("max_threads", ctypes.c_uint32),
        ("names", ctypes.c_char_p * MAX_ARGS), ("writes", ctypes.c_uint8 * MAX_ARGS),
    )  # fmt: skip


_PROVIDER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.POINTER(_Provided)
)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one dispatch moved: all, and each once. Only a checked device counts."""

    label: str
    bytes_read: int
    bytes_written: int
    distinct_read: int
    distinct_written: int


class EmulatedMetal(Device):
    """``act`` is bf16 or f32, ``metal`` the language version; the rest are options of tests/emulator/device.cpp."""

    def __init__(
        self, *, act: str = "bf16", metal: int = 320, checked: bool = False, order: str = "forward", seed: int = 1,
        workers: int = 1, late: bool = False,
    ) -> None:  # fmt: skip
        self.act, self.metal, self.checked = act, metal, checked
        self.failure = ""
        self.notes = {}
        self._names: list[bytes] = []  # kept alive: the library holds pointers to them
        self._provider = _PROVIDER(self._provide)
        runtime().msl_provide(self._provider)
        options: dict[str, object] = {"order": order, "seed": seed, "workers": workers}
        # The cpu's kind: it is handed no shaders, and reads no options from the environment.
        super().__init__("cpu", library=runtime_path(), checked=int(checked), late=int(late), **options)
        self.name = "metal"

    def _provide(self, name: bytes, constants: Any, count: int, out: Any) -> int:
        """Compiles a kernel for the device; an error is kept, since none may cross the C code."""
        try:
            table = KERNELS[name.decode()]
            values = {constant_name(c): constants[i] for i, c in enumerate(table.constants)}
            library = kernel_library(table.name, values, act=self.act, metal=self.metal, checked=self.checked)
        except (AssertionError, KeyError) as error:
            self.failure = str(error)
            return 1
        made = out.contents
        made.entry = library.entry
        made.max_threads = min(library.max_threads or 1024, table.max_threads)
        for i, a in enumerate(table.args):
            self._names.append(a.name.encode())
            made.names[i], made.writes[i] = self._names[-1], a.writes
        return 0

    def _check(self, code: int) -> None:
        try:
            super()._check(code)
        except DeviceError as error:
            lines = [located(line) for line in str(error).splitlines()]
            raise type(error)("\n".join([*lines, self.failure]).strip()) from None

    def record(self, plan: Plan, buffers: Mapping[str, Buffer]) -> CommandList:
        """As Device.record; the emulator learns the exact size of every view."""
        sizes = [v.nbytes for d in plan.dispatches for v in d.views]
        self.lib.msl_announce((ctypes.c_uint64 * len(sizes))(*sizes), len(sizes))
        return super().record(plan, buffers)

    def traffic(self, plans: Sequence[Plan]) -> list[Traffic]:
        """What each dispatch of the last submission, which ran ``plans``, moved."""
        out = []
        for i, label in enumerate(d.label for p in plans for d in p.dispatches):
            counts = (ctypes.c_uint64 * 4)()
            assert self.lib.msl_dispatch_counts(ctypes.c_void_p(self.handle), i, counts), (
                "fewer dispatches than planned"
            )
            out.append(Traffic(label, *counts))
        return out


@contextmanager
def emulated_engine(
    model: Path | None, *, act: str = "bf16", ablate: Sequence[str] = (), max_context: int = 4096, **options: Any
) -> Iterator[Engine]:
    """An engine whose device is an EmulatedMetal with ``act`` and ``options``.

    Kernels are compiled when a list first names them: compiling all that any request could need takes a minute.
    """

    def open_device(name: str, **_: object) -> Device:
        return EmulatedMetal(act=act, **options)

    with (
        mock.patch.dict(POLICIES, metal=replace(POLICIES["metal"], act=act)),
        mock.patch("lily.engine.open_checked", open_device),
        mock.patch("lily.engine.compile_pipelines"),
    ):
        engine = Engine(model, device="metal", ablate=ablate, max_context=max_context)
    with engine:
        yield engine
