"""Writes a byte-level BPE tokenizer of any vocabulary, for random checkpoints, which have no text.

Its tokens are the 256 bytes, then pairs of letters, then three letters and so on, each made of one
before it and a letter: so every id has text of its own, as those of a real tokenizer have.
"""

import itertools
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes `folder`/tokenizer.json; the same size always gives the same tokenizer.

    Raises:
        ValueError: There is no room for all bytes.
    """
    num_bytes = len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < num_bytes:
        raise ValueError(f"vocab_size must be at least {num_bytes}, got {vocab_size}.")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), vocab_size - num_bytes))
    tokens += [left + right for left, right in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _merges() -> Iterator[tuple[str, str]]:
    """("a", "a"), ("a", "b"), ... ("z", "z"), ("aa", "a"), ("aa", "b"), ..."""
    words = list(string.ascii_lowercase)
    while True:
        words = [(word, letter) for word in words for letter in string.ascii_lowercase]
        yield from words
        words = ["".join(pair) for pair in words]
