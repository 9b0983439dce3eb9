# SPDX-License-Identifier: Apache-2.0
"""Reads what matters of a 64-bit Mach-O file: architecture, system, libraries, symbols, names of Objective-C messages.

What a file imports stands in its binding tables, which the system's loader reads; symbols say what it exports.
Not handled: files for several architectures, chained fixups, code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

ARM64 = 0x0100000C
DYNAMIC_LIBRARY, BUNDLE = 6, 8
MACOS = 1
_ID, _LOAD, _WEAK, _REEXPORT = 0x0D, 0x0C, 0x80000018, 0x8000001F
_SYMTAB, _SEGMENT, _BUILD_VERSION, _RPATH, _SIGNATURE, _BINDINGS = 0x02, 0x19, 0x32, 0x8000001C, 0x1D, 0x80000022
_EXTERNAL, _PRIVATE, _TYPE, _UNDEFINED = 0x01, 0x10, 0x0E, 0x00
_SPECIAL = {0: "self", 15: "executable", 14: "dynamic lookup", 13: "weak lookup"}


@dataclass
class MachO:
    """A parsed file."""

    architecture: int
    kind: int
    install_name: str = ""
    libraries: list[str] = field(default_factory=list)  # as linked, in order
    rpaths: list[str] = field(default_factory=list)
    platform: int = 0
    minimum_os: str = ""
    exports: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)  # symbol → library, or what _SPECIAL says
    messages: set[str] = field(default_factory=set)
    signed: bool = False


def read(path: Path) -> MachO:
    """Parses ``path``; ValueError if it is something else."""
    raw = path.read_bytes()
    if len(raw) < 32 or struct.unpack_from("<I", raw)[0] != 0xFEEDFACF:
        raise ValueError(f"{path} is no 64-bit Mach-O file")
    _, architecture, _, kind, commands = struct.unpack_from("<5I", raw)
    out = MachO(architecture, kind)
    symbols: tuple[int, ...] = (0, 0, 0, 0)
    bindings: tuple[int, ...] = ()
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", raw, at)
        if command in (_ID, _LOAD, _WEAK, _REEXPORT, _RPATH):
            text = _text(raw, at + struct.unpack_from("<I", raw, at + 8)[0])
            if command == _ID:
                out.install_name = text
            else:
                (out.rpaths if command == _RPATH else out.libraries).append(text)
        elif command == _BUILD_VERSION:
            out.platform, version = struct.unpack_from("<2I", raw, at + 8)
            out.minimum_os = f"{version >> 16}.{version >> 8 & 255}"
        elif command == _SYMTAB:
            symbols = struct.unpack_from("<4I", raw, at + 8)
        elif command == _BINDINGS:
            _, _, bind, bind_bytes, _, _, lazy, lazy_bytes = struct.unpack_from("<8I", raw, at + 8)
            bindings = (bind, bind_bytes, lazy, lazy_bytes)
        elif command == _SEGMENT:
            _read_messages(raw, at, out)
        out.signed |= command == _SIGNATURE
        at += size
    _read_exports(raw, symbols, out)
    for offset, bytes_ in zip(bindings[::2], bindings[1::2], strict=True):
        _read_bindings(raw[offset : offset + bytes_], out)
    return out


def _text(raw: bytes, at: int) -> str:
    return raw[at : raw.index(b"\0", at)].decode()


def _read_messages(raw: bytes, segment: int, out: MachO) -> None:
    for i in range(struct.unpack_from("<I", raw, segment + 64)[0]):
        section = segment + 72 + 80 * i
        if raw[section : section + 16].rstrip(b"\0") == b"__objc_methname":
            _, size, offset = struct.unpack_from("<2QI", raw, section + 32)
            out.messages |= {name.decode() for name in raw[offset : offset + size].split(b"\0") if name}


def _read_exports(raw: bytes, table: tuple[int, ...], out: MachO) -> None:
    offset, count, strings, _ = table
    for i in range(count):
        name, kind, _, _, _ = struct.unpack_from("<IBBHQ", raw, offset + 16 * i)
        if kind & _EXTERNAL and not kind & (0xE0 | _PRIVATE) and kind & _TYPE != _UNDEFINED:
            out.exports.add(_text(raw, strings + name))


def _read_bindings(table: bytes, out: MachO) -> None:
    """Runs the little program that says which symbol comes from which library."""
    at, library, symbol = 0, "", ""

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = table[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(table):
        operation, operand = table[at] & 0xF0, table[at] & 0x0F
        at += 1
        if operation == 0x10:  # the library by its number
            library = out.libraries[operand - 1] if operand else "self"
        elif operation == 0x20:
            library = out.libraries[number() - 1]
        elif operation == 0x30:
            library = _SPECIAL[operand]
        elif operation == 0x40:  # the symbol
            symbol = _text(table, at)
            at += len(symbol) + 1
        elif operation in (0x60, 0x70, 0x80):  # an addend, a place
            number()
        elif operation in (0x90, 0xA0, 0xB0, 0xC0):  # binds
            out.imports[symbol] = library
            for _ in range({0xA0: 1, 0xC0: 2}.get(operation, 0)):
                number()
