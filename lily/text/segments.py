# SPDX-License-Identifier: Apache-2.0
"""Token ids of the messages of a chat, remembered: a long chat comes again with each turn, and only its end is new.

Added tokens are found in a text before anything else is done to it, and what lies between them is encoded by itself.
So a text may be cut in front of each token that opens a message, if no other added token can lie across such a cut.
Not handled: encoding (tokenizer.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

MARK = "<|im_start|>"
LIMIT = 32 << 20
"""Bytes of remembered texts and ids, about: a chat of 50,000 tokens takes 2 MB."""

_ID_BYTES, _ENTRY_BYTES = 8, 200

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


def can_cut(added: Collection[str]) -> bool:
    """Whether texts may be cut in front of MARK: it is an ``added`` token that no other one overlaps."""
    others = [token for token in added if token != MARK]
    begins = tuple(MARK[:size] for size in range(1, len(MARK) + 1))
    return MARK in added and not any(MARK in token or token.endswith(begins) for token in others)


class Segments:
    """Encodes texts in segments that begin with MARK, those that it has seen lately from memory. For any thread.

    encode: from texts to their ids.
    """

    def __init__(self, encode: Encode, limit: int = LIMIT) -> None:
        self._encode, self._limit = encode, limit
        self._known: OrderedDict[str, Sequence[int]] = OrderedDict()  # the one that was used last is last
        self._bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""
        segments = _segments(text)
        with self._lock:
            found = {segment: self._known[segment] for segment in segments if segment in self._known}
            for segment in found:
                self._known.move_to_end(segment)
        missing = list(dict.fromkeys(segment for segment in segments if segment not in found))
        made = dict(zip(missing, self._encode(missing), strict=True)) if missing else {}
        self._remember(made)
        found |= made
        return [id for segment in segments for id in found[segment]]

    def _remember(self, made: dict[str, Sequence[int]]) -> None:
        with self._lock:
            for segment, ids in made.items():
                if segment not in self._known:
                    self._known[segment] = ids
                    self._bytes += _size(segment, ids)
            while self._bytes > self._limit:
                self._bytes -= _size(*self._known.popitem(last=False))


def _segments(text: str) -> list[str]:
    first, *rest = text.split(MARK)
    return ([first] if first else []) + [MARK + part for part in rest]


def _size(segment: str, ids: Sequence[int]) -> int:
    return 4 * len(segment) + _ID_BYTES * len(ids) + _ENTRY_BYTES
