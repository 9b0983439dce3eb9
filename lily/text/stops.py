# SPDX-License-Identifier: Apache-2.0
"""Stop strings, matched on streamed text.

Stop strings that are a control token, whose text is never shown, become stop ids. Not handled: stop ids themselves (the
device sees those), strings that hold more than a control token, and which part of a reply (reasoning, content) is
searched: the caller pushes what is to be searched. Text is compared character by character, without Unicode
normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from lily.sampling import check_stops


def stop_ids(stops: object, id_of: Callable[[str], int | None], hidden: Set[int]) -> tuple[int, ...]:
    """Ids of those ``stops`` that are exactly one token of the ``hidden`` ones, whose text is never in the reply.

    id_of: from a token's spelling to its id, None for what is no single token.
    """
    ids = map(id_of, check_stops(stops))
    return tuple(id for id in ids if id is not None and id in hidden)


class StopMatcher:
    """Passes the text of one reply through up to the first stop string.

    The match that *starts* first wins, so the text that comes out is the whole text cut at the first place where any
    stop string stands, however it is chopped. To be sure of that, a match waits while another one that would start
    earlier is still possible. Text is held back only while it may be the beginning of a stop string.

    stopped: a stop string was found. matched: that string (of several at the same place, the shortest), else None.
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        self._stops = check_stops(stops)
        self._first_chars = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, stopped). After a stop: ("", True)."""
        if self.stopped:
            return "", True
        if not self._held and self._first_chars.isdisjoint(text):  # the usual token, at a quarter of the time
            return text, False
        text = self._held + text
        match_start, match = self._first_match(text)
        unfinished_start = min((_unfinished_start(text, stop) for stop in self._stops), default=len(text))
        if match is not None and match_start <= unfinished_start:
            return self._stop(text[:match_start], match)
        self._held = text[unfinished_start:]
        return text[:unfinished_start], False

    def flush(self) -> str:
        """The text still held back, at the end of the reply.

        A complete match may be in it, that waited for one starting earlier: then ``stopped`` is true from now on.
        """
        held, self._held = self._held, ""
        match_start, match = self._first_match(held)
        return held if match is None else self._stop(held[:match_start], match)[0]

    def _stop(self, shown: str, match: str) -> tuple[str, bool]:
        self._held = ""
        self.matched, self.stopped = match, True
        return shown, True

    def _first_match(self, text: str) -> tuple[int, str | None]:
        found = ((text.find(stop), len(stop), stop) for stop in self._stops)
        start, _, stop = min((hit for hit in found if hit[0] >= 0), default=(len(text), 0, None))
        return start, stop


def _unfinished_start(text: str, stop: str) -> int:
    """Where the longest end of ``text`` begins that is a beginning of ``stop``, not all of it; else len(text)."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)
