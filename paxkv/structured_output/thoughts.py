"""Thoughts before a form: tokens between `<think>` and `</think>`, without a grammar."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxkv.structured_output.token_limits import token_bits

_CLOSE_BYTES = b"</think>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtTokens:
    """Tokens of a vocabulary that begin and end thoughts, and masks for thoughts.

    Args:
        open_id: The token `<think>`.
        close_id: The token `</think>`, after which the form begins.
        kept_np: i32[8, num_words], masks of allowed tokens. They allow the text `</think>` only as
            the token `close_id`, so that the engine and readers of the text find the same end. Row
            0 applies in every thought. It excludes tokens that end the answer, tokens without text,
            and other tokens that contain the tag. Row k applies after a text that ends with the
            first k characters of the tag. It excludes tokens that begin with the rest of the tag.
        token_bytes: The bytes of each token.
    """

    open_id: int
    close_id: int
    kept_np: np.ndarray
    token_bytes: Sequence[bytes]


def find_thought_tokens(
    token_bytes: Sequence[bytes],
    *,
    open_id: int,
    close_id: int,
    eos_token_ids: Sequence[int],
    num_words: int,
) -> ThoughtTokens:
    """Searches the whole vocabulary."""
    spelled = [i for i, text in enumerate(token_bytes) if _CLOSE_BYTES in text and i != close_id]
    without_text = [i for i, text in enumerate(token_bytes) if not text]
    excluded = [[*spelled, *eos_token_ids, *without_text]]
    for num_chars in range(1, len(_CLOSE_BYTES)):
        rest = _CLOSE_BYTES[num_chars:]
        excluded.append([i for i, text in enumerate(token_bytes) if text.startswith(rest)])
    return ThoughtTokens(
        open_id=open_id,
        close_id=close_id,
        kept_np=np.stack([~token_bits(token_ids, num_words) for token_ids in excluded]),
        token_bytes=token_bytes,
    )


class Thoughts:
    """The state of a request before its form begins.

    Args:
        is_begun: Whether the answer begins within thoughts, because of the prompt or the model.
            Otherwise its first token decides whether there are thoughts.
    """

    def __init__(self, tokens: ThoughtTokens, *, is_begun: bool) -> None:
        self._tokens = tokens
        self._is_open = is_begun
        self._tail = b""

    @property
    def is_open(self) -> bool:
        """Whether the request is within thoughts. Otherwise thoughts or the form may begin."""
        return self._is_open

    def allow(
        self,
        mask_np: np.ndarray,  # i32[num_words]
    ) -> None:
        """Changes a mask for the beginning of the form, in place, to the tokens allowed now."""
        if not self._is_open:
            mask_np |= token_bits([self._tokens.open_id], len(mask_np))
            return
        kept_np = self._tokens.kept_np
        mask_np[:] = kept_np[0]
        for num_chars in range(1, len(_CLOSE_BYTES)):
            if self._tail.endswith(_CLOSE_BYTES[:num_chars]):
                mask_np &= kept_np[num_chars]

    def advance(self, token_id: int) -> bool:
        """Advances by a token. Returns whether it closes thoughts, or begins a form without any."""
        if not self._is_open:
            self._is_open = token_id == self._tokens.open_id
            return not self._is_open
        if token_id == self._tokens.close_id:
            return True
        self._tail = (self._tail + self._tokens.token_bytes[token_id])[-len(_CLOSE_BYTES) :]
        return False
