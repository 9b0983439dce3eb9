# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut into chunks, and where the state is worth keeping.

Which kernel route runs depends on the number of rows, so edges are a function of the tokens alone (Reuse in
docs/architecture.md): a fixed grid of absolute positions, plus starts of messages.  Then a reused run executes exactly
the remaining chunks of the cold run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lily.policy import Policy

# Chat templates rewrite earlier turns only from the last messages on, so these are where the next prompt departs.
KEPT_MESSAGES = 2


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end); ``keep``: the state at ``end`` is a point to come back to."""

    start: int
    end: int
    keep: bool


def cut(tokens: Sequence[int], start: int, policy: Policy, message_start: int | None) -> Iterator[Chunk]:
    """The chunks of ``tokens`` from ``start`` on; ``message_start`` is the id that opens a message, if there is one."""
    n = len(tokens)
    starts = [i for i, id in enumerate(tokens) if id == message_start and i] if message_start is not None else []
    keep = set(starts[-KEPT_MESSAGES:])
    grid = set(policy.chunk_edges(n))
    # Kernels that give the same bits for any number of rows leave the edges free.
    edges = grid | (keep if policy.rows_invariant else set(starts)) | {n}
    if grid:
        keep.add(max(grid))
    if policy.rows_invariant and not starts and n > 1:
        # Without messages to cut at, the same prompt again, or a longer one, finds all but the last token done.
        keep.add(n - 1)
        edges.add(n - 1)
    at = start
    for edge in sorted(e for e in edges if e > start):
        yield Chunk(at, edge, edge in keep)
        at = edge
