# SPDX-License-Identifier: Apache-2.0
"""Ids that are remembered by message: the same as of the whole text, whatever is in it, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from needs import REAL_DATA, real_tokenizer
from paths import EMBEDDED

from lily.text.segments import MARK, Segments, can_cut
from lily.text.tokenizer import Tokenizer

REAL = real_tokenizer()

# What stands next to a cut may be taken apart, put together with what is behind it, or look like another token.
PIECES = (
    MARK, "<|im_end|>", "<|im_start", "|im_start|>", "<", "<|", "|>", "<|im_<|im_start|>start|>", "<think>", "</think>",
    "<tool_call>", "<|endoftext|>", "user", "assistant\n", "\n", "\n\n", " ", "   ", "\t", "e", "\u0301", "é",
    "a\u0323\u0302", "가", "\u1100", "\u1161", "👩‍👩‍👧", "\u200d", "1", "12345", "'s", "word", " word", "Wörter",
    "\r\n", "\u3000", "ﬁ", "\ufeff",
)  # fmt: skip


@pytest.mark.parametrize(
    "folder", [EMBEDDED, pytest.param(REAL, marks=pytest.mark.skipif(REAL is None, reason=REAL_DATA))],
    ids=["embedded", "real"],
)  # fmt: skip
def test_segments_have_the_ids_of_the_whole_text(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(folder, backend.get_vocab_size(with_added_tokens=True))
    assert tokenizer._segments is not None
    rng = np.random.default_rng(3)
    for _ in range(1500):
        text = "".join(rng.choice(PIECES, size=int(rng.integers(1, 14)))) + (MARK if rng.random() < 0.2 else "")
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids, ascii(text)


class Counted:
    """Letters as their code points; which texts were encoded."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[Sequence[int]]:
        self.asked += texts
        return [[*map(ord, text)] for text in texts]


def test_only_what_is_new_is_encoded() -> None:
    counted = Counted()
    segments = Segments(counted)
    chat = f"first{MARK}a{MARK}b{MARK}a"
    assert segments.encode(chat) == [*map(ord, chat)]
    assert counted.asked == ["first", f"{MARK}a", f"{MARK}b"]
    longer = chat + f"{MARK}c"
    assert segments.encode(longer) == [*map(ord, longer)]
    assert counted.asked[3:] == [f"{MARK}c"]
    assert segments.encode("") == []


def test_what_was_used_longest_ago_is_forgotten() -> None:
    counted = Counted()
    segments = Segments(counted, limit=3 * 400)
    names = [f"{MARK}{n}" for n in range(3)]
    for name in names:
        segments.encode(name)
    segments.encode(names[0])
    segments.encode(f"{MARK}3")
    assert counted.asked == [*names, f"{MARK}3"]
    segments.encode(names[0] + names[1])
    assert counted.asked[4:] == [names[1]]
    huge = f"{MARK}{'x' * 2000}"
    assert segments.encode(huge) == segments.encode(huge) == [*map(ord, huge)]


def test_threads_share_what_is_known() -> None:
    segments = Segments(Counted(), limit=3000)
    chats = [MARK.join(str(n % 7) for n in range(start, start + 20)) for start in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(segments.encode, chats)) == [[*map(ord, chat)] for chat in chats]


@pytest.mark.parametrize(
    ("others", "can"),
    [((), True), (("<|im_end|>", "<think>"), True), (("x<",), False), (("a<|im_",), False), ((f"{MARK}user",), False)],
)
def test_a_text_is_not_cut_where_another_token_may_lie_across(others: tuple[str, ...], can: bool) -> None:
    assert can_cut([MARK, *others]) is can
    assert not can_cut(others)
