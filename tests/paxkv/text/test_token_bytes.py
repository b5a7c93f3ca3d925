"""The bytes of tokens join to the bytes of their text, also if characters are split."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paxkv.text.token_bytes import TokenBytes
from tests.paxkv.text.small_tokenizers import (
    BOS,
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
BYTE_LEVEL = byte_level_tokenizer([b"\xe6\xbc", b" \xc3", b"ab"])
SENTENCEPIECE = sentencepiece_tokenizer()


@given(text=texts)
def test_bytes_of_byte_level_tokens_join_to_the_text(text):
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert b"".join(map(BYTE_LEVEL.token_bytes, token_ids)) == text.encode()


@given(data=st.binary(min_size=1, max_size=1))
def test_each_byte_token_has_its_byte(data):
    assert BYTE_LEVEL.token_bytes(data[0]) == data


def test_parts_of_characters_have_their_own_bytes():
    token_ids = [256, 0xA2]
    # The bytes of one token are no valid text. Those of both tokens are one character.
    assert [BYTE_LEVEL.token_text(i) for i in token_ids] == ["\ufffd", "\ufffd"]
    assert b"".join(map(BYTE_LEVEL.token_bytes, token_ids)) == "漢".encode()
    assert BYTE_LEVEL.token_bytes(257) == b" \xc3"


@pytest.mark.parametrize("text", ["漢", "😀", "é", "\ufffd"])
def test_byte_fallback_tokens_of_sentencepiece_have_their_byte(text):
    token_ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert b"".join(map(SENTENCEPIECE.token_bytes, token_ids)) == text.encode()
    word = SENTENCEPIECE.token_to_id("▁red")
    assert SENTENCEPIECE.token_bytes(word) == b" red"


def test_special_and_unknown_tokens_have_the_bytes_of_their_text():
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.token_to_id(BOS)) == BOS.encode()
    assert BYTE_LEVEL.token_bytes(10**6) == b""


def test_names_that_only_resemble_byte_tokens_are_text():
    """A byte-level vocabulary may have "<0xE6>" as a word."""
    assert TokenBytes(byte_level_backend()).of("<0xE6>", "<0xE6>") == b"<0xE6>"
    without_decoder = TokenBytes(tokenizers.Tokenizer(tokenizers.models.BPE()))
    assert without_decoder.of("<0xE6>", "\ufffd") == "\ufffd".encode()
