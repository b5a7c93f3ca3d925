"""The bound on characters per token holds for every text; some tokenizers have no bound."""

import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from paxkv.text.token_bounds import find_max_chars_per_token
from paxkv.text.tokenizer import Tokenizer
from tests.paxkv.text.small_tokenizers import byte_level_backend, sentencepiece_tokenizer

PIECES = (b"hello", b" world", "日本".encode())


def nfc_backend():
    backend = byte_level_backend(PIECES)
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    return backend


def merging_backend():
    """A tokenizer whose merges produce its longest token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "aa", "aaaa"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    backend = byte_level_backend()
    backend.model = models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")])
    return backend


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.text("a ᾂ́\t"))
def test_text_has_at_least_as_many_tokens_as_its_bound(text):
    composed = unicodedata.normalize("NFD", text)
    for backend in (byte_level_backend(PIECES), nfc_backend(), merging_backend()):
        bound = find_max_chars_per_token(backend)
        for form in (text, composed, 20 * "a" + text):
            num_tokens = len(Tokenizer(backend).encode(form, add_special_tokens=False))
            assert num_tokens * bound >= len(form)


def test_bound_is_the_length_of_the_longest_name():
    # </s> has four characters, " world" six, and "日本" six bytes.
    assert find_max_chars_per_token(byte_level_backend(PIECES)) == 6
    assert find_max_chars_per_token(byte_level_backend([b"0123456789"])) == 10
    assert find_max_chars_per_token(nfc_backend()) == 24
    assert sentencepiece_tokenizer().max_chars_per_token == 6


def split(pattern, behavior):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior), pre_tokenizers.ByteLevel()]
    )


def without_a_byte(backend):
    vocab = backend.get_vocab(with_added_tokens=False)
    backend.model = models.BPE(vocab={k: v for k, v in vocab.items() if k != "a"}, merges=[])


def with_a_byte_that_is_only_added(backend):
    without_a_byte(backend)
    backend.add_tokens([AddedToken("a", single_word=True)])


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "pre_tokenizer", split(r"\s+", "removed")),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.Replace("aa", "a")),
        lambda b: setattr(b, "normalizer", normalizers.Replace(Regex("a+"), "a")),
        lambda b: b.add_tokens([AddedToken("<end>", rstrip=True)]),
        lambda b: setattr(b, "model", models.WordLevel({"a": 0}, unk_token="a")),
        # With this suffix, "a" at the end of a word needs the token "a</w>", which does not exist.
        lambda b: setattr(b.model, "end_of_word_suffix", "</w>"),
        lambda b: setattr(b.model, "continuing_subword_prefix", "##"),
        lambda b: setattr(b, "pre_tokenizer", None),
        without_a_byte,
        with_a_byte_that_is_only_added,
    ],
)
def test_tokenizers_that_drop_text_have_no_bound(change):
    backend = byte_level_backend()
    change(backend)
    assert find_max_chars_per_token(backend) is None


def test_added_token_counts_with_its_normalized_name():
    backend = tokenizers.Tokenizer.from_str(sentencepiece_tokenizer().json)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.add_tokens([AddedToken(16 * " ", normalized=True)])
    # Its normalized name is 17 "▁" long, so 170 of them are ten tokens after the first "▁".
    assert len(Tokenizer(backend).encode(170 * " ", add_special_tokens=False)) == 11
    assert find_max_chars_per_token(backend) == 17


def test_steps_that_keep_all_text_do_not_change_the_bound():
    backend = byte_level_backend()
    backend.pre_tokenizer = split(r"\s+", "isolated")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    assert find_max_chars_per_token(backend) == 4
