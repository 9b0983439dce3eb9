# SPDX-License-Identifier: Apache-2.0
"""Generates <Metal/Metal.h> for Objective-C from metal-cpp, the C++ declarations that Apple publishes (Apache-2.0).

metal-cpp calls Objective-C by selector strings, so method names, types and enum values are all there; this module turns
them back into protocols and interfaces.  ``python tests/metal/metal_headers.py METAL_CPP_FOLDER METAL_H``.

Not handled: structures with anonymous unions; nullability, availability and ownership, which metal-cpp does not tell.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

FOUNDATION_CLASSES = {
    "String", "Error", "URL", "Array", "Dictionary", "Data", "Object", "Set", "Bundle", "Number", "Date", "Enumerator",
}  # fmt: skip
FOUNDATION_VALUES = {
    "UInteger": "NSUInteger",
    "Integer": "NSInteger",
    "Range": "NSRange",
    "TimeInterval": "NSTimeInterval",
}
PLAIN_TYPES = {
    **{t: t for t in ("void", "float", "double", "char", "size_t", "SEL", "IOSurfaceRef", "CFTimeInterval")},
    **{t: t for t in ("dispatch_data_t", "dispatch_queue_t")},
    **{f"{sign}int{bits}_t": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "BOOL", "kern_return_t": "int", "task_id_token_t": "unsigned int",
}  # fmt: skip

# Metal hands a reflection object back through a pointer; metal-cpp spells that type in a way that no rule here covers.
BY_HAND = {
    ("MTLDevice", "newComputePipelineStateWithDescriptor:options:reflection:error:"):
        "- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)d "
        "options:(MTLPipelineOption)o reflection:(MTLComputePipelineReflection **)r error:(NSError **)error;",
}  # fmt: skip

PREAMBLE = """// Generated from metal-cpp: declarations only.
#pragma once
#import <Foundation/Foundation.h>
#ifndef __APPLE__
typedef void *dispatch_data_t;
typedef void *dispatch_queue_t;
typedef void *IOSurfaceRef;
typedef double CFTimeInterval;
#endif
"""
POSTAMBLE = """
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
    MTLSize size = {width, height, depth};
    return size;
}
id<MTLDevice> MTLCreateSystemDefaultDevice(void);
NSArray *MTLCopyAllDevices(void);
"""


@dataclass
class Declared:
    """A class of metal-cpp: a protocol in Objective-C, unless it can be allocated."""

    name: str
    bases: str
    allocated: bool
    methods: dict[str, str] = field(default_factory=dict)  # by kind and selector


class Headers:
    """What metal-cpp declares; ``text`` is the Objective-C header."""

    def __init__(self, folder: Path) -> None:
        files = sorted((folder / "Metal").glob("*.hpp"))
        if not files:
            raise FileNotFoundError(f"{folder} has no Metal/*.hpp")
        self.source = [re.sub(r"//[^\n]*", "", f.read_text(encoding="utf-8")) for f in files]
        joined = "\n".join(self.source)
        self.selectors = dict(re.findall(r'_MTL_PRIVATE_DEF_SEL\((\w+),\s*"([^"]+)"\)', joined))
        self.enums: list[tuple[str, str, str, list[tuple[str, str]]]] = []  # prefix, integer type, name, values
        self.structs: list[tuple[str, str, str]] = []  # prefix, name, body
        self.classes: dict[str, Declared] = {}
        self.aliases: dict[str, str] = {}
        self.skipped: list[str] = []
        for text in self.source:
            for prefix, body in re.findall(r"namespace (MTL4?)\s*\{(.*?)\n\}[ \t]*(?:\n|$)", text, re.S):
                self._read_namespace(prefix, body)
        self._enum_names = {p + n for p, _, n, _ in self.enums}
        self._struct_names = {p + n for p, n, _ in self.structs}
        self._read_methods(joined)

    def _read_namespace(self, prefix: str, body: str) -> None:
        for base, name, values in re.findall(r"_MTL_(?:ENUM|OPTIONS)\(([\w:]+), (\w+)\) \{(.*?)\};", body, re.S):
            listed = re.findall(r"^\s*(\w+)\s*(?:=\s*([^,\n]+))?,?", values, re.M)
            self.enums.append((prefix, FOUNDATION_VALUES.get(base.removeprefix("NS::"), base), name, listed))
        for name, members in re.findall(r"\nstruct (\w+)\s*\n\{(.*?)\n\} ?_?", body, re.S):
            self.structs.append((prefix, name, members))
        for name, bases, members in re.findall(r"\nclass (\w+) : public ([^\n{]+)\n\{(.*?)\n\};", body, re.S):
            allocated = re.search(r"static [\w:]+\*\s+alloc\(", members) is not None
            self.classes[prefix + name] = Declared(prefix + name, bases, allocated)
        for name, alias in re.findall(r"using (\w+) = (void \(\^\)\([^;]*\));", body):
            self.aliases[prefix + name] = alias
        for name, alias in re.findall(r"using (\w+) = ([\w:]+);", body):
            self.aliases.setdefault(prefix + name, alias)
        for alias, name in re.findall(r"typedef ([\w:]+) (\w+);", body):
            self.aliases.setdefault(prefix + name, alias)

    # ---- types
    def c_type(self, text: str, prefix: str) -> str | None:
        """A C++ type as Objective-C writes it; None for one that cannot be told."""
        text = re.sub(r"\bclass ", "", text.strip())
        if "std::" in text or "&" in text:
            return None
        is_array = text.endswith("[]")
        text = text.removesuffix("[]")
        stars = text.count("*") + is_array
        constant = "const" in text
        m = re.fullmatch(r"(?:(MTL4?|NS)::)?(\w+)", re.sub(r"\bconst\b|\*", "", text).strip())
        if not m:
            return None
        space, name = m[1], m[2]
        if space == "NS":
            return self._foundation_type(name, stars, constant)
        own = (space or prefix) + name
        if own in self.classes:
            return self._object_type(own, stars, is_array or constant)
        if own in self._enum_names or own in self._struct_names:
            return _pointer(own, stars, constant)
        if own in self.aliases:
            return self._alias_type(self.aliases[own], space or prefix)
        return _pointer(PLAIN_TYPES[name], stars, constant) if not space and name in PLAIN_TYPES else None

    @staticmethod
    def _foundation_type(name: str, stars: int, constant: bool) -> str | None:
        if name in FOUNDATION_CLASSES:
            if stars < 2:
                return f"NS{name} *"
            return "NSError **" if name == "Error" else f"NS{name} * const *"
        return _pointer(FOUNDATION_VALUES[name], stars, constant) if name in FOUNDATION_VALUES else None

    def _object_type(self, name: str, stars: int, constant: bool) -> str | None:
        if self.classes[name].allocated:
            return {1: f"{name} *", 2: f"{name} * const *"}.get(stars)
        return {1: f"id<{name}>", 2: f"const id<{name}> *" if constant else f"id<{name}> *"}.get(stars)

    def _alias_type(self, alias: str, prefix: str) -> str | None:
        if "(^)" not in alias:
            return self.c_type(alias, prefix)
        m = re.search(r"\^\)\((.*)\)", alias, re.S)
        assert m
        return self._block_type(m[1], prefix)

    def _block_type(self, arguments: str, prefix: str) -> str | None:
        types = [self.c_type(a, prefix) for a in arguments.split(",")]
        return None if None in types else f"void (^)({', '.join(t for t in types if t)})"

    # ---- methods
    def _read_methods(self, joined: str) -> None:
        definition = r"_MTL_INLINE ([^\n;{]*?)\s*(MTL4?)::(\w+)::(\w+)\(([^\n]*)\)(?: const)?\s*\n\{\n(.*?)\n\}"
        for result, prefix, name, _, arguments, body in re.findall(definition, joined, re.S):
            m = re.search(r"sendMessage(?:Safe)?<.*?>\((this|_MTL_PRIVATE_CLS\(\w+\)), _MTL_PRIVATE_SEL\((\w+)\)", body)
            if not m or m[2] not in self.selectors or prefix + name not in self.classes:
                continue
            selector, kind = self.selectors[m[2]], "-" if m[1] == "this" else "+"
            declared = BY_HAND.get((prefix + name, selector)) or self._method(
                kind, selector, result, prefix, name, arguments
            )
            if declared is None:
                self.skipped.append(f"{prefix}{name} {selector}")
            else:
                self.classes[prefix + name].methods[kind + selector] = declared

    def _method(self, kind: str, selector: str, result: str, prefix: str, owner: str, arguments: str) -> str | None:
        listed = re.split(r",(?![^(]*\)(?:$|,))", arguments) if arguments.strip() else []
        typed = [self._argument(a.strip(), prefix) for a in listed]
        # Constructors name their class; their names in metal-cpp are plain ``init``.
        returned = "instancetype" if result.strip() in (f"{prefix}::{owner}*", "") else self.c_type(result, prefix)
        if returned == "instancetype" and not selector.startswith("init"):
            returned = self.c_type(f"{prefix}::{owner}*", prefix)
        if returned is None or None in typed or selector.count(":") != len(typed):
            return None
        if not typed:
            return f"{kind} ({returned}){selector};"
        parts = [f"{part}:({a[0]}){a[1]}" for part, a in zip(selector.split(":"), typed, strict=False) if a]
        return f"{kind} ({returned}){' '.join(parts)};"

    def _argument(self, text: str, prefix: str) -> tuple[str, str] | None:
        block = re.fullmatch(r"void \(\^(\w+)\)\((.*)\)", text, re.S)
        if block:
            kind, name = self._block_type(block[2], prefix), block[1]
        else:
            m = re.fullmatch(r"(.*?)(\w+)(\[\])?", text, re.S)
            if not m:
                return None
            kind, name = self.c_type(m[1] + (m[3] or ""), prefix), m[2]
        return (kind, name) if kind else None

    # ---- output
    def text(self) -> str:
        """The header."""
        out = [PREAMBLE, *(self._enum(*e) for e in self.enums)]
        protocols = [c.name for c in self.classes.values() if not c.allocated]
        out += [f"@protocol {name};" for name in protocols]
        out += [f"@class {c.name};" for c in self.classes.values() if c.allocated]
        out += self._struct_texts()
        done: set[str] = set()
        for name in self.classes:
            self._declare(name, out, done)
        return "\n".join(out) + POSTAMBLE

    @staticmethod
    def _enum(prefix: str, base: str, name: str, values: list[tuple[str, str]]) -> str:
        own = {v for v, _ in values}
        lines = []
        for value, expression in values:
            plain = re.sub(r"(?<=[0-9a-fA-F])[uUlL]+\b", "", expression.replace("NS::UIntegerMax", "NSUIntegerMax"))
            plain = re.sub(r"[A-Za-z_]\w*", lambda m: prefix + m[0] if m[0] in own else m[0], plain.strip())
            lines.append(f"    {prefix}{value}{f' = {plain}' if plain else ''},\n")
        return f"typedef enum : {base} {{\n{''.join(lines)}}} {prefix}{name};"

    def _struct_texts(self) -> list[str]:
        """Structures in an order in which members are complete; what holds others than plain members is left out."""
        out: list[str] = []
        known: set[str] = set()
        waiting = {p + n: m for p, n, b in self.structs if (m := self._members(p, b)) is not None}
        while ready := [n for n, m in waiting.items() if not {t for t, _ in m if t in self._struct_names} - known]:
            for name in ready:
                members = waiting.pop(name)
                known.add(name)
                out.append(f"typedef struct {{ {' '.join(f'{t} {n};' for t, n in members)} }} {name};")
        self.skipped += sorted({p + n for p, n, _ in self.structs} - known)
        return out

    def _members(self, prefix: str, body: str) -> list[tuple[str, str]] | None:
        out = []
        for line in (part.strip() for part in body.split(";")):
            if not line or "(" in line:
                continue
            m = re.fullmatch(r"([\w:]+)\s+(\w+(?:\[\w+\])*)", line)
            kind = self.c_type(m[1], prefix) if m else None
            if not m or kind is None:
                return None
            out.append((kind, m[2]))
        return out

    def _declare(self, name: str, out: list[str], done: set[str]) -> None:
        if name in done:
            return
        done.add(name)
        declared = self.classes[name]
        bases = [b for b in self._bases(name) if self.classes[b].allocated == declared.allocated]
        for base in bases:
            self._declare(base, out, done)
        if declared.allocated:
            copying = " <NSCopying>" if "Copying" in declared.bases else ""
            head = f"@interface {name} : {bases[0] if bases else 'NSObject'}{copying}"
        else:
            head = f"@protocol {name} <{', '.join(bases) or 'NSObject'}>"
        out.append("\n".join([head, *declared.methods.values(), "@end"]))

    def _bases(self, name: str) -> list[str]:
        found = []
        for prefix, base in re.findall(r"(?:(MTL4?)::)?(\w+)", self.classes[name].bases):
            own = [prefix] if prefix else ["MTL4", "MTL"] if name.startswith("MTL4") else ["MTL"]
            match = next((p + base for p in own if p + base in self.classes and p + base != name), None)
            if match and match not in found:
                found.append(match)
        return found


def _pointer(name: str, stars: int, constant: bool) -> str:
    return ("const " if constant and stars else "") + name + (" " + "*" * stars if stars else "")


if __name__ == "__main__":
    made = Headers(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(made.text(), encoding="utf-8")
    methods = sum(len(c.methods) for c in made.classes.values())
    print(f"{len(made.enums)} enums, {len(made.classes)} classes and protocols, {methods} methods; left out:")
    print("\n".join(f"  {s}" for s in made.skipped))
