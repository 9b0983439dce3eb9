# SPDX-License-Identifier: Apache-2.0
"""The detokenizer's pieces always add up to the bytes decoded at once, wherever characters are split."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lily.text.detokenizer import Detokenizer

SAMPLES = [
    "plain text",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "你好,世界!こんにちは",
    "👩‍👩‍👧‍👦 🇨🇿 👍🏽",
    "e\u0301 \u200b \ufeff \ufffd \x00",
]
# Bytes at the edges of UTF-8's rules: overlong forms, surrogates, beyond U+10FFFF, cut and stray sequences.
EDGE_BYTES = [
    0x00,
    0x7F,
    0x80,
    0x8F,
    0x90,
    0x9F,
    0xA0,
    0xBF,
    0xC0,
    0xC2,
    0xE0,
    0xE2,
    0xED,
    0xEF,
    0xF0,
    0xF4,
    0xF5,
    0xFF,
]


def stream(pieces: list[bytes], **options: frozenset[int]) -> list[str]:
    """What each token shows, then what flush shows, when token i has the bytes pieces[i]."""
    detokenizer = Detokenizer(pieces, **options)
    return [*(detokenizer.push(id) for id in range(len(pieces))), detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_a_token_per_byte(text: str) -> None:
    pieces = [bytes([byte]) for byte in text.encode()]
    assert "".join(stream(pieces)) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_every_split_into_three_tokens(text: str) -> None:
    data = text.encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            assert "".join(stream([data[:first], data[first:second], data[second:]])) == text


@given(st.lists(st.binary(max_size=5), max_size=12))
@example([b"\xe0", b"\x80"])
@example([b"\xf0\x9f", b"\x98", b"a"])
@example([b"\xed", b"\xa0\x80"])
@settings(deadline=None)
def test_invalid_bytes_are_replaced_as_if_decoded_at_once(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.lists(st.lists(st.sampled_from(EDGE_BYTES), max_size=3).map(bytes), max_size=8))
@settings(deadline=None, max_examples=500)
def test_edges_of_utf8_are_replaced_as_if_decoded_at_once(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20), st.data())
@settings(deadline=None)
def test_every_character_is_shown_as_soon_as_its_last_byte_is_there(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cut = data.draw(st.integers(0, len(encoded)))
    shown = stream([encoded[:cut]])[0]
    assert shown == encoded[:cut].decode("utf-8", "ignore")
    assert text.startswith(shown)


def test_an_unfinished_character_is_held_then_replaced_at_the_end() -> None:
    assert stream([b"ok \xf0\x9f\x98"]) == ["ok ", "\ufffd"]


def test_skipped_ids_leave_no_trace_even_inside_a_character() -> None:
    assert stream([b"\xc5", b"<|im_end|>", b"\x99"], skip_ids=frozenset({1})) == ["", "", "ř", ""]


def test_ids_that_are_not_skipped_are_shown() -> None:
    assert stream([b"<think>", b"", b"hm"]) == ["<think>", "", "hm", ""]


def test_flush_leaves_it_ready_for_the_next_text() -> None:
    detokenizer = Detokenizer([b"\xe2\x82", b"\xac", b"x"])
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "\ufffd", "")
    assert (detokenizer.push(0), detokenizer.push(1), detokenizer.push(2)) == ("", "€", "x")
