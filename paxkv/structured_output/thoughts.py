"""Thoughts before a form: tokens between `<think>` and `</think>`, which no grammar binds."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxkv.structured_output.token_limits import token_bits

_CLOSE_BYTES = b"</think>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtTokens:
    """What a model's vocabulary has to do with thoughts.

    Args:
        open_id: The token `<think>`.
        close_id: The token `</think>`, after which the form begins.
        kept_np: i32[8, num_words], masks of allowed tokens. Row 0 holds in any thought: it leaves
            out tokens that end the answer, tokens without a text, and tokens with the tag in them
            other than `close_id`. Row k holds after a thought that ends in the first k characters
            of the tag: it leaves out tokens that begin with the rest of the tag. So the engine and
            the readers of the text find the same end.
        token_bytes: Of each token.
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
    """Looks through the whole vocabulary."""
    spelled = [i for i, text in enumerate(token_bytes) if _CLOSE_BYTES in text and i != close_id]
    without_text = [i for i, text in enumerate(token_bytes) if not text]
    lost = [[*spelled, *eos_token_ids, *without_text]]
    for num_chars in range(1, len(_CLOSE_BYTES)):
        rest = _CLOSE_BYTES[num_chars:]
        lost.append([i for i, text in enumerate(token_bytes) if text.startswith(rest)])
    return ThoughtTokens(
        open_id=open_id,
        close_id=close_id,
        kept_np=np.stack([~token_bits(token_ids, num_words) for token_ids in lost]),
        token_bytes=token_bytes,
    )


class Thoughts:
    """Where a request stands before its form begins.

    Args:
        is_begun: Its prompt ends in thoughts, or its model always begins with them. Else its first
            token says whether there are any.
    """

    def __init__(self, tokens: ThoughtTokens, *, is_begun: bool) -> None:
        self._tokens = tokens
        self._is_open = is_begun
        self._tail = b""

    @property
    def is_open(self) -> bool:
        """Whether thoughts are written; else they may begin, or the form does."""
        return self._is_open

    def allow(
        self,
        mask_np: np.ndarray,  # i32[num_words]
    ) -> None:
        """Makes of what the form allows as its beginning what may be drawn now, in place."""
        if not self._is_open:
            mask_np |= token_bits([self._tokens.open_id], len(mask_np))
            return
        kept_np = self._tokens.kept_np
        mask_np[:] = kept_np[0]
        for num_chars in range(1, len(_CLOSE_BYTES)):
            if self._tail.endswith(_CLOSE_BYTES[:num_chars]):
                mask_np &= kept_np[num_chars]

    def take(self, token_id: int) -> bool:
        """Whether the form begins behind this token, or with it where thoughts are not open."""
        if not self._is_open:
            self._is_open = token_id == self._tokens.open_id
            return not self._is_open
        if token_id == self._tokens.close_id:
            return True
        self._tail = (self._tail + self._tokens.token_bytes[token_id])[-len(_CLOSE_BYTES) :]
        return False
