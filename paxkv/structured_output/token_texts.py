"""`TokenTexts`: the bytes of a model's tokens, and the tokens with given bytes."""

import llguidance


def text_of_token(tokenizer: llguidance.LLTokenizer, token_id: int) -> bytes:
    """A token's bytes, which are empty if the tokenizer has no such token."""
    text = tokenizer.decode_bytes([token_id])
    # llguidance's text for a token without bytes.
    return b"" if text == f"<[{token_id}]>".encode() else text


class TokenTexts:
    """The texts of a vocabulary. Creating this takes 0.1 s for a large vocabulary."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        # Empty for ids that the tokenizer does not have.
        self.by_id = [text_of_token(tokenizer, i) for i in range(tokenizer.vocab_size)]
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.by_id):
            if text:
                self._ids.setdefault(text, []).append(token_id)
        self._max_bytes = max(map(len, self.by_id))
        self.beginning_with_digit = [i for i, text in enumerate(self.by_id) if text[:1].isdigit()]

    def beginnings(self, text: bytes) -> list[int]:
        """The tokens that are a beginning of a text, or all of it: "ab" -> "a" and "ab"."""
        lengths = range(1, min(len(text), self._max_bytes) + 1)
        return [token_id for n in lengths for token_id in self._ids.get(text[:n], ())]
