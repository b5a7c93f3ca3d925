"""`TokenTexts`: the bytes of a model's tokens, and the tokens of bytes."""

import llguidance


def text_of_token(tokenizer: llguidance.LLTokenizer, token_id: int) -> bytes:
    """A token's bytes, which are empty if the tokenizer has no such token."""
    text = tokenizer.decode_bytes([token_id])
    # llguidance writes a token without bytes in this way.
    return b"" if text == f"<[{token_id}]>".encode() else text


class TokenTexts:
    """Made from a whole vocabulary, which takes a tenth of a second if it is large."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        # Empty for ids that the tokenizer does not have: no text, thought or form has them.
        self.by_id = [text_of_token(tokenizer, i) for i in range(tokenizer.vocab_size)]
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.by_id):
            if text:
                self._ids.setdefault(text, []).append(token_id)
        self._max_bytes = max(map(len, self.by_id))
        self.beginning_with_digit = [i for i, text in enumerate(self.by_id) if text[:1].isdigit()]

    def beginnings(self, text: bytes) -> list[int]:
        """Tokens with which a text may begin, and which go no further: "ab" -> "a" and "ab"."""
        lengths = range(1, min(len(text), self._max_bytes) + 1)
        return [token_id for n in lengths for token_id in self._ids.get(text[:n], ())]
