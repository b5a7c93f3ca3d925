"""Thoughts stand apart from the answer, however the text comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.text.reasoning_parser import ReasoningParser, ReasoningSplit

FRAGMENTS = ("<think>", "</think>", "<thi", "</th", "<", " ", "\n", "text", "é")


def _read(pieces, *, starts_thinking):
    parser = ReasoningParser(starts_thinking=starts_thinking)
    parts = [*map(parser.feed, pieces), parser.finish()]
    return ReasoningSplit(
        "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
    )


@pytest.mark.parametrize(
    ("text", "opened", "unopened"),
    [
        ("<think>a</think>\nb", ("a", "\nb"), ("a", "\nb")),
        ("a</think>b", ("a", "b"), ("", "a</think>b")),
        ("\n<think>a", ("a", ""), ("a", "")),
        ("a", ("a", ""), ("", "a")),
        ("<thin", ("<thin", ""), ("", "<thin")),
        ("<think>a</thi", ("a</thi", ""), ("a</thi", "")),
        ("<think></think>", ("", ""), ("", "")),
        ("", ("", ""), ("", "")),
    ],
)
def test_thoughts_and_answer(text, opened, unopened):
    assert _read([text], starts_thinking=True) == ReasoningSplit(*opened)
    assert _read([text], starts_thinking=False) == ReasoningSplit(*unopened)


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    cut=st.integers(0, 50),
    starts_thinking=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_whole(text, cut, starts_thinking):
    whole = _read([text], starts_thinking=starts_thinking)
    for pieces in ([text[:cut], text[cut:]], list(text)):
        assert _read(pieces, starts_thinking=starts_thinking) == whole
