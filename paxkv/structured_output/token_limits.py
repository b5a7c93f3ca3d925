"""`TokenLimits`: the tokens that a request's own settings exclude from its grammar's mask."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from paxkv.config.sampling_params import MAX_BAD_WORD_TOKENS
from paxkv.contracts.engine_request import EngineRequest

_BITS = 32


def token_bits(token_ids: Iterable[int], num_words: int) -> np.ndarray:  # i32[num_words]
    """A mask with the bits of these tokens set, as in a `GrammarBitmask`."""
    is_in_np = np.zeros(num_words * _BITS, np.uint8)
    is_in_np[list(token_ids)] = 1
    return np.packbits(is_in_np, bitorder="little").view("<i4")


class TokenLimits:
    """`allowed_token_ids`, `bad_words` and `min_tokens` of one request, on the host.

    The device applies these settings too. They are applied here to find out in time that, together
    with a grammar, they leave no token.
    """

    def __init__(self, request: EngineRequest, num_words: int) -> None:
        params = request.sampling_params
        self._num_words = num_words
        # None if all tokens are allowed.
        self._kept_np: np.ndarray | None = None
        banned = [word[0] for word in request.bad_words_token_ids if len(word) == 1]
        if banned or params.allowed_token_ids is not None:
            self._kept_np = ~token_bits(banned, num_words)
        if params.allowed_token_ids is not None:
            self._kept_np &= token_bits(params.allowed_token_ids, num_words)
        self._num_early_tokens = params.min_tokens
        if params.min_tokens > 0:
            ends = (*request.eos_token_ids, *(params.stop_token_ids or ()))
            self._no_ends_np = ~token_bits(ends, num_words)
        self._bad_words = [word for word in request.bad_words_token_ids if len(word) > 1]
        self._last_tokens: deque[int] = deque(maxlen=MAX_BAD_WORD_TOKENS - 1)

    def copy(self) -> "TokenLimits":
        """A copy that can advance by other tokens."""
        copied = copy.copy(self)
        copied._last_tokens = self._last_tokens.copy()
        return copied

    @property
    def has_any(self) -> bool:
        """Whether any tokens are excluded, apart from ends below `min_tokens`."""
        return self._kept_np is not None or bool(self._bad_words)

    def narrow(
        self,
        mask_np: np.ndarray,  # i32[num_words]
    ) -> None:
        """Removes tokens that are not allowed next from a mask, in place."""
        if self._kept_np is not None:
            mask_np &= self._kept_np
        if self._num_early_tokens > 0:
            mask_np &= self._no_ends_np
        if self._bad_words:
            last_tokens = tuple(self._last_tokens)
            banned = [
                word[-1]
                for word in self._bad_words
                if last_tokens[len(last_tokens) - len(word) + 1 :] == tuple(word[:-1])
            ]
            mask_np &= ~token_bits(banned, self._num_words)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advances by the request's new output tokens."""
        self._num_early_tokens -= len(token_ids)
        if self._bad_words:
            self._last_tokens.extend(token_ids)
