# SPDX-License-Identifier: Apache-2.0
"""Python's side of a device library (objc_shim/lily_device.h): buffers, kernels, recorded lists, submission.

Loading, recording and small transfers happen here, through ctypes.  The per-token loop does not: it calls the same
functions by pointer (``lily/_submit.pyx``).
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lily.device.kinds import choose_device, environment_options, kind_of, library_path
from lily.device.shader_library import shader_options
from lily.errors import DeviceError
from lily.kernels import Kernel
from lily.msl.flatten import flatten
from lily.plan.views import Plan

ABI_VERSION = 2
OK, EINVAL, ENOMEM, ENOTFOUND, EFAILED, ETIMEOUT, ELOST = range(7)
_SLICE = 50_000_000  # nanoseconds


class _Arg(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_void_p), ("offset", ctypes.c_uint64))


_P, _U32, _U64, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
_OUT = ctypes.POINTER(ctypes.c_void_p)
_U32x3 = ctypes.c_uint32 * 3
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "lily_abi_version": (_U32, []),
    "lily_open": (_INT, [ctypes.c_char_p, _OUT, ctypes.c_char_p, ctypes.c_size_t]),
    "lily_close": (None, [_P]),
    "lily_error": (ctypes.c_char_p, [_P]),
    "lily_info": (_INT, [_P, ctypes.c_char_p, ctypes.c_size_t]),
    "lily_buffer_new": (_INT, [_P, _U64, _INT, _OUT]),
    "lily_buffer_free": (None, [_P]),
    "lily_buffer_contents": (_P, [_P]),
    "lily_buffer_fill": (_INT, [_P, _U64, _U64, _INT]),
    "lily_buffer_copy": (_INT, [_P, _U64, _P, _U64, _U64]),
    "lily_buffer_read": (_INT, [_P, _U64, _U64, _P]),
    "lily_buffer_write": (_INT, [_P, _U64, _U64, _P]),
    "lily_kernel_get": (_INT, [_P, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32), _U32, _OUT]),
    "lily_kernel_fit": (_INT, [_P, _U32]),
    "lily_list_new": (_INT, [_P, _OUT]),
    "lily_list_free": (None, [_P]),
    "lily_list_dispatch": (
        _INT,
        [_P, _P, ctypes.POINTER(_Arg), _U32, ctypes.c_char_p, _U32, _U32x3, _U32x3, _INT],
    ),
    "lily_list_end": (_INT, [_P]),
    "lily_submit": (_INT, [_P, ctypes.POINTER(ctypes.c_void_p), _U32, ctypes.POINTER(_U64)]),
    "lily_completed": (_U64, [_P]),
    "lily_wait": (_INT, [_P, _U64, _U64]),
    "lily_seconds": (ctypes.c_double, [_P, _U64]),
}


@contextmanager
def cpu_remedy(name: str) -> Iterator[None]:
    """Within it, a DeviceError of what ``auto`` chose says how to do without: nothing else is tried in silence."""
    try:
        yield
    except DeviceError as error:
        if name != "auto" or not kind_of(choose_device(name)).gpu or "--device cpu" in str(error):
            raise
        raise DeviceError(f"{error.full}; to run without the GPU choose the cpu device (--device cpu)") from None


def open_device(name: str, **options: Any) -> Device:
    """Opens ``name``, or what ``auto`` stands for."""
    with cpu_remedy(name):
        return Device(choose_device(name), **options)


@contextmanager
def _shaders(device: str, given: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The option that hands a device its shaders, in a file that exists while the device opens."""
    if not kind_of(device).shaders or "source" in given:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="lily-") as folder:
        source, text = Path(folder, "shaders.metal"), flatten()
        source.write_text(text, encoding="utf-8")
        yield {"source": source, **shader_options(text)}


def _load(path: Path) -> Any:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"{path.name} cannot be loaded: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.lily_abi_version() != ABI_VERSION:
        raise DeviceError(
            f"{path.name} speaks version {lib.lily_abi_version()} of the device interface, expected {ABI_VERSION}: "
            "rebuild it with `make build`"
        )
    return lib


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Buffer:
    """Memory of a device. Of a ``shared`` one the host has views, which die with it; any can be transferred.

    A transfer is done when it returns. No unfinished submission may write what it touches, or read what it writes; the
    rest of the buffer may be in use. DeviceError: a range is not within its buffer, and nothing was done.
    """

    def __init__(self, device: Device, nbytes: int, *, shared: bool = True) -> None:
        self.device, self.nbytes = device, nbytes
        self.handle = device._new("lily_buffer_new", max(nbytes, 16), shared)
        self.address: int = device.lib.lily_buffer_contents(self.handle) or 0  # 0: the host does not see it
        raw: Any = (ctypes.c_uint8 * max(nbytes, 16)).from_address(self.address) if self.address else b""
        self._view: Bytes | None = np.frombuffer(raw, np.uint8)[:nbytes] if self.address else None

    @property
    def bytes(self) -> Bytes:
        """A view of its contents."""
        assert self._view is not None, "this memory is the device's own: use read, write, copy and fill"
        return self._view

    def array(self, dtype: Any, count: int = -1) -> np.ndarray[Any, Any]:
        """A view of its contents as ``dtype``."""
        size = np.dtype(dtype).itemsize
        count = self.nbytes // size if count < 0 else count
        return np.ndarray((count,), dtype, self.bytes.data)

    # ---- transfers
    def fill(self, value: int = 0) -> None:
        """Sets every byte."""
        self.device._check(self.device.lib.lily_buffer_fill(self.handle, 0, self.nbytes, value))

    def copy(self, source: Buffer, nbytes: int) -> None:
        """Becomes ``source`` in its first ``nbytes``."""
        self.device._check(self.device.lib.lily_buffer_copy(self.handle, 0, source.handle, 0, nbytes))

    def read(self, start: int = 0, nbytes: int = -1) -> Bytes:
        """A copy of the bytes from ``start`` on; -1: of all that follow."""
        out = np.empty(self.nbytes - start if nbytes < 0 else nbytes, np.uint8)
        self.device._check(self.device.lib.lily_buffer_read(self.handle, start, out.size, out.ctypes.data))
        return out

    def write(self, data: np.ndarray[Any, Any], start: int = 0) -> None:
        """Puts ``data``, which is contiguous, at byte ``start``."""
        assert data.flags.c_contiguous
        self.device._check(self.device.lib.lily_buffer_write(self.handle, start, data.nbytes, data.ctypes.data))

    @contextmanager
    def filling(self, start: int, nbytes: int) -> Iterator[Bytes]:
        """Bytes to be written to: they are in the buffer at the end of the block.

        Their contents are the buffer's where the host sees it, else zero.
        """
        if self._view is not None:
            yield self._view[start : start + nbytes]
        else:
            staged = np.zeros(nbytes, np.uint8)
            yield staged
            self.write(staged, start)

    def free(self) -> None:
        """Gives the memory back; nothing submitted may still use it."""
        if self.handle:
            handle, self.handle, self.nbytes = self.handle, 0, 0
            self.device.lib.lily_buffer_free(handle)
            self._view = np.empty(0, np.uint8)


def free(buffers: dict[str, Buffer]) -> None:
    """Gives the memory of all ``buffers`` back and forgets them; nothing submitted may still use it."""
    while buffers:
        buffers.popitem()[1].free()


class CommandList:
    """A recorded plan, to be submitted any number of times."""

    host_steps = False  # whether the host has a part in it (run/host_steps.py)

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.handle = device._new("lily_list_new")

    def run_ahead(self) -> None:
        """Runs what must be done before the list is submitted: nothing, unless the host has a part in it."""

    def free(self) -> None:
        """Gives the list back; none of its submissions may be unfinished."""
        if self.handle:
            handle, self.handle = self.handle, 0
            self.device.lib.lily_list_free(handle)


class Device:
    """An open device. Errors of the library are raised as DeviceError."""

    def __init__(self, name: str, *, library: Path | None = None, **options: object) -> None:
        """Opens ``name`` with options (for cpu: threads, isa, null; for metal: objc_shim/README.md)."""
        self.name = name
        self.notes: dict[str, str] = {}  # what the host found out about it
        self.lib = _load(library or library_path(name))
        options = environment_options(name) | options
        handle, message = ctypes.c_void_p(), ctypes.create_string_buffer(16384)
        with _shaders(name, options) as shaders:
            text = "\n".join(f"{k}={v}" for k, v in (shaders | options).items() if v is not None)
            code = self.lib.lily_open(text.encode(), ctypes.byref(handle), message, len(message))
        if code != OK:
            raise DeviceError(message.value.decode("utf-8", "replace"))
        self.handle = handle.value or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Waits for everything submitted and closes; repeated calls do nothing."""
        if self.handle:
            handle, self.handle = self.handle, 0
            self.lib.lily_close(handle)

    def _new(self, function: str, *arguments: Any) -> int:
        """Handle of a new object from a function whose last argument receives it."""
        handle = ctypes.c_void_p()
        self._check(getattr(self.lib, function)(self.handle, *arguments, ctypes.byref(handle)))
        return handle.value or 0

    def _check(self, code: int) -> None:
        if code == OK:
            return
        text = self.lib.lily_error(self.handle)
        message = text.decode("utf-8", "replace") if text else f"error {code}"
        raise DeviceError(f"{self.name} device: {message}", again=code == EFAILED)

    @property
    def info(self) -> dict[str, str | int]:
        """What the library says about itself: name, isa, threads, bytes of memory …; and ``notes``."""
        out = ctypes.create_string_buffer(4096)
        self._check(self.lib.lily_info(self.handle, out, len(out)))
        lines = out.value.decode("utf-8", "replace").splitlines()
        pairs = (line.split("=", 1) for line in lines if "=" in line)
        return {key: int(value) if value.isdigit() else value for key, value in pairs} | self.notes

    def buffer(self, nbytes: int, *, shared: bool = True) -> Buffer:
        """New zero-filled memory; ``shared``: that the host sees, too."""
        return Buffer(self, nbytes, shared=shared)

    def buffers(self, sizes: Mapping[str, int], *, shared: bool = True) -> dict[str, Buffer]:
        """New zero-filled memory of each size, by name. DeviceError: there is no room for all; then none is left."""
        made: dict[str, Buffer] = {}
        try:
            for name, size in sizes.items():
                made[name] = self.buffer(size, shared=shared)
        except BaseException:
            free(made)
            raise
        return made

    def kernel(self, kernel: Kernel, constants: Iterable[int] = (), threads: int = 0) -> int:
        """Handle of a kernel of the table, specialised; DeviceError if this device has none.

        With ``threads`` all is compiled that groups of that size need. Any thread may call this, several at once too.
        """
        values = list(constants)
        array = (ctypes.c_int32 * max(len(values), 1))(*values)
        handle = self._new("lily_kernel_get", kernel.name.encode(), array, len(values))
        if threads:
            self._check(self.lib.lily_kernel_fit(handle, threads))
        return handle

    def record(self, plan: Plan, buffers: Mapping[str, Buffer]) -> CommandList:
        """Records ``plan`` with its buffer names bound to ``buffers``."""
        for name, size in plan.buffers.items():
            if name not in buffers or buffers[name].nbytes < size:
                have = buffers[name].nbytes if name in buffers else 0
                raise DeviceError(f"plan {plan.name} needs {size} bytes in buffer {name!r}, bound are {have}")
        out = CommandList(self, plan.name)
        try:
            for d in plan.dispatches:
                args = (_Arg * len(d.views))(*(_Arg(buffers[v.buffer].handle, v.offset) for v in d.views))
                params = pack_params(d.kernel, d.params)
                self._check(
                    self.lib.lily_list_dispatch(
                        out.handle, self.kernel(d.kernel, d.constants), args, len(d.views), params, len(params),
                        _U32x3(*d.grid), _U32x3(*d.threads), d.barrier,
                    )
                )  # fmt: skip
            self._check(self.lib.lily_list_end(out.handle))
        except BaseException:
            out.free()
            raise
        return out

    def submit(self, lists: Iterable[CommandList]) -> int:
        """Queues the lists; returns the ticket to wait for. Only the first of them may have host steps."""
        items = list(lists)
        for item in items:
            if item.host_steps:
                assert item is items[0], f"{item.name} has host steps and is submitted after another list"
                item.run_ahead()
        handles = [item.handle for item in items]
        array = (ctypes.c_void_p * len(handles))(*handles)
        ticket = ctypes.c_uint64()
        self._check(self.lib.lily_submit(self.handle, array, len(handles), ctypes.byref(ticket)))
        return ticket.value

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        """Whether ``ticket`` finished within ``timeout`` seconds; DeviceError if it failed. Releases the GIL.

        Without a timeout it waits in slices, so that Ctrl-C breaks in.
        """
        nanoseconds = _SLICE if timeout is None else int(timeout * 1e9)
        while (code := self.lib.lily_wait(self.handle, ticket, nanoseconds)) == ETIMEOUT:
            if timeout is not None:
                return False
        self._check(code)
        return True

    def seconds(self, ticket: int) -> float:
        """Device time of a recent ticket; negative if unknown."""
        return float(self.lib.lily_seconds(self.handle, ticket))

    def function(self, name: str) -> int:
        """Address of one of the library's functions, for calls from Cython."""
        address = ctypes.cast(getattr(self.lib, name), ctypes.c_void_p).value
        assert address is not None
        return address


_FORMATS = {"u32": "I", "i32": "i", "f32": "f"}


def pack_params(kernel: Kernel, values: Iterable[int | float]) -> bytes:
    """The kernel's parameter struct."""
    return struct.pack("<" + "".join(_FORMATS[t] for _, t in kernel.params), *values)
