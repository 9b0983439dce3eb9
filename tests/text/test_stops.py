# SPDX-License-Identifier: Apache-2.0
"""Stop strings cut streamed text exactly where they cut the whole text, however it is chopped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import InvalidRequestError
from lily.sampling import MAX_STOP_CHARS, MAX_STOPS, check_stops
from lily.text.stops import StopMatcher, stop_ids


def cut_whole(text: str, stops: Iterable[str]) -> tuple[str, bool]:
    """The definition: the text up to the first place where any stop string stands."""
    for start in range(len(text)):
        if any(text[start:].startswith(stop) for stop in stops):
            return text[:start], True
    return text, False


def run(pieces: Iterable[str], stops: Iterable[str]) -> tuple[str, bool, str | None]:
    matcher = StopMatcher(list(stops))
    shown = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        assert stopped == matcher.stopped
        if stopped:
            break
    shown.append(matcher.flush())
    return "".join(shown), matcher.stopped, matcher.matched


def choppings(text: str) -> Iterator[list[str]]:
    for cuts in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(bounds)]


CASES = [
    # text, stops, shown, matched
    ("hello world", [], "hello world", None),
    ("hello world", ["xyz"], "hello world", None),
    ("hello STOP rest", ["STOP"], "hello ", "STOP"),
    ("STOP at start", ["STOP"], "", "STOP"),
    ("STOP", ["STOP"], "", "STOP"),
    ("ends in ST", ["STOP"], "ends in ST", None),
    ("aab", ["ab"], "a", "ab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("one two", ["two", "one"], "", "one"),
    ("xabcd", ["bc", "abcd"], "x", "abcd"),  # the one that starts first, though the other is complete earlier
    ("xabcx", ["bc", "abcd"], "xa", "bc"),
    ("xabc", ["bc", "abcd"], "xa", "bc"),  # the reply ends while the longer one is still possible
    ("xab", ["abc", "ab"], "x", "ab"),
    ("a\n\nb", ["\n", "\n\n"], "a", "\n"),
    ("žluť👍🏽 kůň", ["👍🏽"], "žluť", "👍🏽"),
    ("say </s>", ["</s>"], "say ", "</s>"),
]


@pytest.mark.parametrize(("text", "stops", "shown", "matched"), CASES)
def test_every_chopping_shows_what_stands_before_the_stop(
    text: str, stops: list[str], shown: str, matched: str | None
) -> None:
    for pieces in choppings(text):
        assert run(pieces, stops) == (shown, matched is not None, matched), pieces


def test_every_short_text_and_stop_pair_is_cut_as_the_whole_text_is() -> None:
    words = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("ab", repeat=size)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=5)]
    for stops in itertools.combinations(words, 2):
        for text in texts:
            shown, stopped, _ = run(text, stops)
            assert (shown, stopped) == cut_whole(text, stops), (text, stops)


@given(
    st.lists(st.text("ab<\n", max_size=4), max_size=10),
    st.lists(st.text("ab<\n", min_size=1, max_size=5), max_size=4),
)
@settings(deadline=None, max_examples=500)
def test_streamed_equals_not_streamed(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, stopped, matched = run(pieces, stops)
    assert (shown, stopped) == cut_whole(text, stops)
    assert (shown, stopped, matched) == run([text], stops)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(deadline=None, max_examples=500)
def test_only_text_that_may_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = matcher.push(text)
    if not stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_is_shown_at_once_where_no_stop_can_begin() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("harmless S") == ("harmless ", False)
    assert matcher.push("o it goes") == ("So it goes", False)
    assert matcher.push(" STO") == (" ", False)
    assert matcher.push("P tail") == ("", True)


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher("END")
    assert matcher.push("a END b") == ("a ", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""
    assert matcher.matched == "END"


@pytest.mark.parametrize("given_stops", [None, "x", ["x", "y", "x"], ("x",)])
def test_strings_and_lists_of_strings_are_accepted(given_stops: object) -> None:
    expected = {"None": (), "x": ("x",), "['x', 'y', 'x']": ("x", "y"), "('x',)": ("x",)}
    assert check_stops(given_stops) == expected[str(given_stops)]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("", r"stop\[0\] is empty"),
        (["a", ""], r"stop\[1\] is empty"),
        (["a", 3], r"stop\[1\] must be a string, seen int"),
        ({"a": 1}, "seen dict"),
        (b"a", "seen bytes"),
        ([str(number) for number in range(MAX_STOPS + 1)], f"at most {MAX_STOPS}"),
        (["x" * (MAX_STOP_CHARS + 1)], "at most 1,024"),
    ],
)
def test_a_stop_list_that_cannot_be_matched_is_refused(bad: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_stops(bad)


def test_the_largest_stop_list_is_accepted_and_matches() -> None:
    stops = ["x" * (MAX_STOP_CHARS - 1) + chr(ord("A") + number) for number in range(MAX_STOPS)]
    text = "x" * MAX_STOP_CHARS + "B"
    assert run(text, stops) == ("x", True, stops[1])


def test_a_match_ends_the_reply_at_once_though_a_longer_one_could_follow() -> None:
    matcher = StopMatcher(["abc", "ab"])
    assert matcher.push("xab") == ("x", True)
    assert matcher.matched == "ab"


def test_only_a_stop_that_is_one_hidden_token_is_an_id() -> None:
    ids = {"<|end|>": 7, "<think>": 8, "word": 9}
    given_stops = ["a", "<|end|>", "<|end|>\n", "<think>", "word", "<|end|>"]
    assert stop_ids(given_stops, ids.get, {7, 3}) == (7,)
    assert stop_ids(None, ids.get, {7}) == ()
