# SPDX-License-Identifier: Apache-2.0
"""Text from token ids as they arrive, never splitting a character.

Not handled: the choice of what is shown; stop strings (stops.py) are matched on the text made here.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one sequence of token ids into text, piece by piece.

    All pieces of ``push`` and the final ``flush`` together equal the bytes of all tokens, decoded at once with invalid
    bytes replaced by U+FFFD. A push takes constant time; at most the 3 bytes of an unfinished character wait.
    """

    def __init__(self, token_bytes: Sequence[bytes], skip_ids: Set[int] = frozenset()) -> None:
        """token_bytes: bytes of every id (``Tokenizer.token_bytes``, shared). skip_ids: ids without visible text."""
        self._token_bytes = token_bytes
        self._skip_ids = skip_ids
        self._decoder = _new_decoder("replace")

    def push(self, id: int) -> str:
        """The text that is complete now that token ``id`` has arrived: often "", when a character is not finished."""
        if id in self._skip_ids:
            return ""
        return self._decoder.decode(self._token_bytes[id])

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD if it ended inside a character, otherwise ""."""
        return self._decoder.decode(b"", final=True)
