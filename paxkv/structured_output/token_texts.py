"""`TokenTexts`: the bytes of a model's tokens, and the tokens of bytes."""

import llguidance


class TokenTexts:
    """Made from a whole vocabulary, which takes a tenth of a second if it is large."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.by_id = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.by_id):
            self._ids.setdefault(text, []).append(token_id)
        self._max_bytes = max(map(len, self.by_id))

    def beginnings(self, text: bytes) -> list[int]:
        """Tokens with which a text may begin, and which go no further: "ab" -> "a" and "ab"."""
        lengths = range(1, min(len(text), self._max_bytes) + 1)
        return [token_id for n in lengths for token_id in self._ids.get(text[:n], ())]
