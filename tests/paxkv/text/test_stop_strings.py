"""Stop strings are found for any pieces of text, and no more text is held than needed."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paxkv.text.stop_strings import StopStringFinder, StopStringMatch


def feed_all(stops: list[str], pieces: list[str]) -> StopStringMatch | None:
    finder = StopStringFinder(stops)
    return next((match for piece in pieces if (match := finder.feed(piece))), None)


def test_stop_string_is_found_across_pieces() -> None:
    match = feed_all(["</end>"], ["text <", "/e", "nd> more"])
    assert match == StopStringMatch(stop_string="</end>", num_chars=11)


def test_first_complete_or_longest_stop_string_counts() -> None:
    assert feed_all(["abc", "b"], ["abc"]) == StopStringMatch(stop_string="b", num_chars=2)
    assert feed_all(["c", "bc"], ["abc"]) == StopStringMatch(stop_string="bc", num_chars=3)


def test_search_continues_from_the_border_of_a_partial_match() -> None:
    # "b" follows "aba", but the second "a" may start "abac".
    assert feed_all(["abac"], ["ababac"]) == StopStringMatch(stop_string="abac", num_chars=6)
    assert feed_all(["aab"], ["aaab"]) == StopStringMatch(stop_string="aab", num_chars=4)


def test_short_stop_strings_are_found_where_str_find_finds_them() -> None:
    texts = ["".join(chars) for chars in itertools.product("ab", repeat=8)]
    for stop in {text[:length] for text in texts for length in range(1, 6)}:
        for text in texts:
            match, start = feed_all([stop], [text]), text.find(stop)
            assert (match is None) == (start < 0)
            assert match is None or match.num_chars == start + len(stop)


def test_held_text_is_exactly_a_possible_stop_string() -> None:
    finder = StopStringFinder(["\n\nUser:", "\n#"])
    for piece, num_held in [("hello", 0), ("\n", 1), ("\nU", 3), ("s", 4), ("x", 0), ("\n", 1)]:
        assert finder.feed(piece) is None
        assert finder.num_held_chars == num_held


def test_without_stop_strings_no_text_is_held() -> None:
    finder = StopStringFinder([])
    assert finder.feed("anything") is None
    assert finder.num_held_chars == 0


def test_early_stop_string_does_not_count_but_may_start_one() -> None:
    finder = StopStringFinder(["aba"])
    assert finder.feed("aba", may_end=False) is None
    assert finder.num_held_chars == 1
    assert finder.feed("ba") == StopStringMatch(stop_string="aba", num_chars=5)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_result_equals_a_search_in_every_prefix(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = None
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            expected = StopStringMatch(stop_string=max(found, key=len), num_chars=end)
            break
    assert feed_all(stops, pieces) == expected
    if expected is None:
        finder = StopStringFinder(stops)
        finder.feed(text)
        held = [
            n
            for stop in stops
            for n in range(len(stop))
            if text.endswith(stop[:n]) and n <= len(text)
        ]
        assert finder.num_held_chars == max(held)
