# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut into chunks.

Which kernel route runs depends on the number of rows, so where that can change bits (``Policy.canonical``) edges are a
function of the tokens before them alone (Reuse in docs/architecture.md): a fixed grid of absolute positions, and starts
of messages that lie well behind the edge before, since every pass reads all weights.  Then a reused run executes just
the remaining chunks of the cold run.  Elsewhere a prompt is cut wherever its state is to be kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lily.policy import Policy
from lily.run.points import Marks, places


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end); ``keep``: the state at ``end`` is a point to come back to."""

    start: int
    end: int
    keep: bool


def cut(tokens: Sequence[int], start: int, policy: Policy, marks: Marks, shared: Sequence[int] = ()) -> Iterator[Chunk]:
    """The chunks of ``tokens`` from ``start`` on. shared: how many tokens stored sequences have in common with them."""
    edges, kept = _edges(tokens, policy, marks, shared)
    at = start
    for edge in (*(e for e in edges if e > start), len(tokens)):
        yield Chunk(at, edge, edge in kept)
        at = edge


def kept_points(
    tokens: Sequence[int], start: int, policy: Policy, marks: Marks, shared: Sequence[int] = ()
) -> set[int]:
    """The points of a prompt that are worth keeping, the one at ``start`` from which it went on among them."""
    return _edges(tokens, policy, marks, shared)[1] | {start}


def _edges(tokens: Sequence[int], policy: Policy, marks: Marks, shared: Sequence[int]) -> tuple[list[int], set[int]]:
    """Where a prompt is cut before its end, and at which of these edges its state is kept.

    What is in common with other sequences is worth a point only where reading it again would take a while.
    """
    grid = policy.chunk_edges(len(tokens))
    kept = places(tokens, marks, grid, [n for n in shared if n >= policy.message_gap])
    if policy.canonical:
        edges = canonical_edges(tokens, policy, marks)
        return edges, {edges[at - 1] for place in kept if (at := bisect_right(edges, place))}
    if marks.message not in tokens:  # the same prompt again, or a longer one, finds all but the last token done
        kept |= {len(tokens) - 1} - {0}
    return sorted({*grid, *kept}), kept


def canonical_edges(tokens: Sequence[int], policy: Policy, marks: Marks) -> list[int]:
    """Where a prompt is cut, whatever follows: without its start and end."""
    grid = set(policy.chunk_edges(len(tokens)))
    edges, last = [], 0
    for place in sorted(grid | set(marks.starts(tokens))):
        if place in grid or place - last >= policy.message_gap:
            edges.append(place)
            last = place
    return edges
