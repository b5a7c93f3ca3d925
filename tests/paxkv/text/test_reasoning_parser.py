"""Thoughts are separated from the answer, for any pieces of text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.text.reasoning_parser import ReasoningParser, ReasoningSplit, thought_token_ids
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

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
def test_thoughts_are_separated_from_the_answer(text, opened, unopened):
    assert _read([text], starts_thinking=True) == ReasoningSplit(*opened)
    assert _read([text], starts_thinking=False) == ReasoningSplit(*unopened)


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    cut=st.integers(0, 50),
    starts_thinking=st.booleans(),
)
@settings(max_examples=200)
def test_result_does_not_depend_on_the_pieces(text, cut, starts_thinking):
    whole = _read([text], starts_thinking=starts_thinking)
    for pieces in ([text[:cut], text[cut:]], list(text)):
        assert _read(pieces, starts_thinking=starts_thinking) == whole


def test_tags_have_ids_only_if_both_can_be_sampled_and_shown():
    def find(*, vocab_size=1000, **tokens):
        tokenizer = byte_level_tokenizer()
        tokenizer._backend.add_tokens(tokens.get("plain", []))
        tokenizer._backend.add_special_tokens(tokens.get("special", []))
        added = tokenizer._backend.get_added_tokens_decoder().items()
        tokenizer.special_token_ids = frozenset(i for i, token in added if token.special)
        return thought_token_ids(tokenizer, vocab_size)

    tags = ["<think>", "</think>"]
    open_id, close_id = find(plain=tags)
    assert close_id == open_id + 1
    assert find() is None
    assert find(plain=tags[:1]) is None
    assert find(special=tags) is None
    assert find(plain=tags, vocab_size=close_id) is None
