"""`DigitLimit`: limits the digits of a number in JSON, if the schema allows any number.

A small model at temperature 0 may write digits until `max_tokens`. llguidance has no setting for
the length of a number. So after many digits, the mask leaves out tokens that begin with a digit.
"""

import numpy as np

from paxkv.structured_output.token_limits import token_bits
from paxkv.structured_output.token_texts import TokenTexts

# Limit on digits in a row: in the integer, the fraction and the exponent. A 128-bit integer has 39.
MAX_DIGITS = 40
_DIGITS = b"0123456789"
_QUOTE, _BACKSLASH = b'"\\'


class DigitLimit:
    """Reads the JSON of one answer, token by token."""

    def __init__(self, token_texts: TokenTexts, num_words: int) -> None:
        self._token_texts = token_texts
        self._num_words = num_words
        self._is_in_string = False
        self._is_escaped = False
        self._num_digits = 0

    def narrow(
        self,
        mask_np: np.ndarray,  # i32[num_words]
    ) -> None:
        """Removes tokens that begin with a digit from a mask, in place, after `MAX_DIGITS`."""
        if self._num_digits < MAX_DIGITS:
            return
        others_np = mask_np & ~token_bits(self._token_texts.beginning_with_digit, self._num_words)
        # If only digits may follow, the schema needs a longer number, such as at least 10**50.
        if others_np.any():
            mask_np[:] = others_np

    def advance(self, token_id: int) -> None:
        """Reads a new token of the answer."""
        for byte in self._token_texts.by_id[token_id]:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_in_string = byte != _QUOTE
                self._is_escaped = byte == _BACKSLASH
            else:
                self._is_in_string = byte == _QUOTE
                self._num_digits = self._num_digits + 1 if byte in _DIGITS else 0
