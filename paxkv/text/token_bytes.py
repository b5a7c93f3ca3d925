"""`TokenBytes`: the bytes of a token, even if it is only a part of a character."""

import json
import re
from collections.abc import Mapping

import tokenizers

_REPLACEMENT_CHAR = "\N{REPLACEMENT CHARACTER}"
# The name of a byte token in SentencePiece's byte fallback.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of tokens whose text by itself is not valid UTF-8.

    A character may consist of several tokens: "漢" is E6 BC A2, and each of these bytes may be a
    token. Decoded alone, each becomes U+FFFD, but its name in the vocabulary shows its byte.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        steps = _decoder_steps(backend)
        self._byte_of_char = _byte_of_char() if "ByteLevel" in steps else {}
        self._has_byte_tokens = "ByteFallback" in steps

    def of(self, name: str | None, text: str) -> bytes:
        """The bytes of a token.

        Args:
            name: The token's name in the vocabulary; None if it has none.
            text: The token's text if it is decoded alone.
        """
        if _REPLACEMENT_CHAR in text and name is not None:
            match = _BYTE_TOKEN.fullmatch(name) if self._has_byte_tokens else None
            if match is not None:
                return bytes([int(match[1], 16)])
            if self._byte_of_char and all(char in self._byte_of_char for char in name):
                return bytes(self._byte_of_char[char] for char in name)
        return text.encode("utf-8", errors="replace")


def _decoder_steps(backend: tokenizers.Tokenizer) -> set[str]:
    """The types of the decoder's steps."""
    if backend.decoder is None:
        return set()
    # The library shows a decoder's steps only in its pickled form, which is JSON.
    decoder: Mapping[str, object] = json.loads(backend.decoder.__getstate__())
    return {str(step["type"]) for step in decoder.get("decoders", [decoder])}


def _byte_of_char() -> dict[str, int]:
    """Maps characters of byte-level vocabularies to bytes. Printable Latin-1 bytes are written as
    themselves, other bytes as the characters from U+0100 on.

    Source: GPT-2's `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}
