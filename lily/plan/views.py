# SPDX-License-Identifier: Apache-2.0
"""Byte ranges of named buffers, and the dispatches that use them: the plan as pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from lily.kernels import Kernel

Values = dict[str, Any]  # arguments of a launch by their names in the kernel table


@dataclass(frozen=True)
class View:
    """``nbytes`` of the buffer called ``buffer`` from ``offset``.

    The range decides hazards.  ``touched`` and ``written`` only count traffic: the distinct bytes that are really read,
    and written (8 of 256 experts; a KV cache read up to the context, and one row of it written).
    """

    buffer: str
    offset: int
    nbytes: int
    touched: int = -1
    written: int = -1

    def __post_init__(self) -> None:
        if self.touched < 0:
            object.__setattr__(self, "touched", self.nbytes)
        if self.written < 0:
            object.__setattr__(self, "written", self.touched)

    def part(self, offset: int, nbytes: int) -> View:
        """``nbytes`` from ``offset`` on within this view."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{offset}+{nbytes} lies outside of {self}")
        return View(self.buffer, self.offset + offset, nbytes)

    def using(self, touched: int, written: int | None = None) -> View:
        """The same range, of which only ``touched`` bytes are used (and ``written`` written, if that differs)."""
        touched = min(touched, self.nbytes)
        return View(self.buffer, self.offset, self.nbytes, touched, touched if written is None else written)

    def overlaps(self, other: View) -> bool:
        return (
            self.buffer == other.buffer
            and self.offset < other.offset + other.nbytes
            and other.offset < self.offset + self.nbytes
        )


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch. ``level`` and ``barrier`` are filled in by ``hazards.schedule``.

    ``host``: the host runs it, between two submissions (``lily/host_steps.py``).
    """

    kernel: Kernel
    label: str
    constants: tuple[int, ...]
    views: tuple[View, ...]  # in the order of kernel.args
    params: tuple[int | float, ...]  # in the order of kernel.params
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    level: int = 0
    barrier: bool = False
    host: bool = False

    @property
    def bytes_read(self) -> int:
        return sum(v.touched for a, v in zip(self.kernel.args, self.views, strict=True) if a.reads)

    @property
    def bytes_written(self) -> int:
        return sum(v.written for a, v in zip(self.kernel.args, self.views, strict=True) if a.writes)

    def describe(self) -> dict[str, Any]:
        """For ``plan --json``."""
        return {
            "level": self.level,
            "barrier": self.barrier,
            "label": self.label,
            "kernel": self.kernel.name,
            "host": self.host,
            "constants": dict(zip(self.kernel.constants, self.constants, strict=True)),
            "params": {n: v for (n, _), v in zip(self.kernel.params, self.params, strict=True)},
            "grid": list(self.grid),
            "threads": list(self.threads),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "args": [
                {"name": a.name, "access": a.access, "buffer": v.buffer, "offset": v.offset, "nbytes": v.nbytes}
                for a, v in zip(self.kernel.args, self.views, strict=True)
            ],
        }


@dataclass(frozen=True)
class Plan:
    """A scheduled list of dispatches and the scratch memory that it needs."""

    name: str
    dispatches: tuple[Dispatch, ...]
    scratch_bytes: int
    buffers: dict[str, int] = field(default_factory=dict)  # bytes of each buffer the dispatches name, at least
    edges: tuple[int, ...] = ()  # dispatches with which a layer begins, and the one after the last layer

    def parts(self, count: int) -> list[Plan]:
        """The plan in at most ``count`` pieces of whole layers, each to be submitted by itself."""
        layers = max(1, len(self.edges) - 1)
        count = min(count, layers)
        cuts = [0, *(self.edges[layers * k // count] for k in range(1, count)), len(self.dispatches)]
        pieces = [self.dispatches[start:end] for start, end in pairwise(cuts)]
        return [replace(self, dispatches=(replace(piece[0], barrier=False), *piece[1:])) for piece in pieces]

    def segments(self) -> Iterator[tuple[Plan, Dispatch | None]]:
        """What is submitted at a time, and the host's step after it; a plan without host steps is one segment."""
        run: list[Dispatch] = []
        for d in self.dispatches:
            if d.host:
                yield replace(self, dispatches=tuple(run)), d
                run = []
            else:
                run.append(d if run else replace(d, barrier=False))
        yield replace(self, dispatches=tuple(run)), None

    @property
    def levels(self) -> int:
        return self.dispatches[-1].level + 1 if self.dispatches else 0

    @property
    def barriers(self) -> int:
        return sum(d.barrier for d in self.dispatches)

    @property
    def bytes(self) -> int:
        """Distinct device bytes of each dispatch, read and written, summed over the dispatches."""
        return sum(d.bytes_read + d.bytes_written for d in self.dispatches)
