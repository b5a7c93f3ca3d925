"""`BoundRequest`: the tokens that one request may get next, by its grammar and its settings."""

import copy
import dataclasses
from collections.abc import Sequence

import llguidance
import numpy as np

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_output import NO_TOKEN_LEFT
from paxkv.structured_output.digit_limit import DigitLimit
from paxkv.structured_output.plain_reasons import describe_failure
from paxkv.structured_output.thoughts import Thoughts
from paxkv.structured_output.token_limits import TokenLimits, token_bits
from paxkv.structured_output.token_texts import TokenTexts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarEnd:
    """The end of a request: because its form is complete, or because of `error`."""

    error: str | None = None


class BoundRequest:
    """Follows the output tokens of one request.

    If the form is complete and nothing may follow, the request ends, even with `ignore_eos` or
    below `min_tokens`.

    Args:
        matcher: The request's own matcher, before its first token.
        form: What the request asked for, for errors.
        token_texts: Only needed if `limits.has_any`; otherwise None.
        thoughts: The thoughts before the form; None allows none.
        digit_limit: Only for forms that are JSON.
        eos_token_ids: Tokens that end an answer whose form is complete.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        limits: TokenLimits,
        *,
        form: StructuredOutputsParams,
        token_texts: TokenTexts | None,
        thoughts: Thoughts | None,
        digit_limit: DigitLimit | None = None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._matcher = matcher
        self._limits = limits
        self._form = form
        self._num_tokens = 0
        self._token_texts = token_texts
        self._thoughts = thoughts
        self._digit_limit = digit_limit
        self._eos_token_ids = eos_token_ids

    def copy(self) -> "BoundRequest":
        """A copy that can advance by drafts, which the request may never get."""
        copied = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        copied._limits = self._limits.copy()
        copied._thoughts = copy.copy(self._thoughts)
        copied._digit_limit = copy.copy(self._digit_limit)
        return copied

    @property
    def mask_matcher(self) -> llguidance.LLMatcher | None:
        """The matcher that fills the next mask; None within thoughts."""
        is_thinking = self._thoughts is not None and self._thoughts.is_open
        return None if is_thinking else self._matcher

    def narrow(
        self,
        mask_np: np.ndarray,  # i32[num_words]
    ) -> GrammarEnd | None:
        """Restricts the matcher's mask, in place. Returns the request's end if no token is left."""
        if self._matcher.is_error():
            return self._failure(self._matcher.get_error())
        if self._thoughts is not None:
            self._thoughts.allow(mask_np)
        self._limits.narrow(mask_np)
        if self._token_texts is not None and self._thoughts is None and not mask_np.any():
            mask_np |= self._other_spellings(self._token_texts, len(mask_np))
            self._limits.narrow(mask_np)
        if self._digit_limit is not None and self._thoughts is None:
            self._digit_limit.narrow(mask_np)
        if mask_np.any():
            return None
        is_complete = self._thoughts is None and self._matcher.is_accepting()
        return GrammarEnd() if is_complete else self._failure(NO_TOKEN_LEFT)

    def _other_spellings(
        self, token_texts: TokenTexts, num_words: int
    ) -> np.ndarray:  # i32[num_words]
        """All tokens with which the text that must follow can begin.

        llguidance allows only its usual tokens: before "true" the token "true", but not "t".
        """
        text = self._matcher.compute_ff_bytes()
        ids = [
            token_id
            for token_id in token_texts.beginnings(text)
            if self._matcher.validate_tokens([token_id]) == 1
        ]
        return token_bits(ids, num_words)

    def advance(self, token_ids: Sequence[int]) -> GrammarEnd | None:
        """Advances by new tokens. Returns the request's end if it ends with them."""
        self._limits.advance(token_ids)
        for token_id in token_ids:
            self._num_tokens += 1
            if self._thoughts is not None:
                was_open = self._thoughts.is_open
                if self._thoughts.advance(token_id):
                    self._thoughts = None
                if was_open or self._thoughts is not None:
                    continue
            if token_id in self._eos_token_ids and self._matcher.is_accepting():
                return GrammarEnd()
            if self._digit_limit is not None:
                self._digit_limit.advance(token_id)
            if not self._matcher.consume_token(token_id):
                return self._failure(self._matcher.get_error() or "the last token is not allowed")
        return None

    def _failure(self, reason: str) -> GrammarEnd:
        return GrammarEnd(error=describe_failure(self._form, reason, num_tokens=self._num_tokens))
