"""A tokenizer of any size, each of whose ids is text of its own."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.random_tokenizer import write_tokenizer


def test_every_id_has_a_text_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 16_384)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 16_384
    # Bytes above 127 are no characters alone.
    texts = {tokenizer.decode([token_id]) for token_id in range(256, 16_384)}
    assert len(texts) == 16_384 - 256
    assert min(map(len, texts)) > 1 and "aaa" in texts
    assert tokenizer.decode(tokenizer.encode("What is 2 + 2? né").ids) == "What is 2 + 2? né"


def test_too_few_tokens_for_all_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 256, got 255"):
        write_tokenizer(tmp_path, 255)
