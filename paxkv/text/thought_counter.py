"""`ThoughtCounter`: how many tokens of an answer are its thoughts."""

import bisect
from collections.abc import Sequence

from paxkv.text.reasoning_parser import THOUGHTS_END, ReasoningParser
from paxkv.text.tokenizer import Tokenizer


class ThoughtCounter:
    """Counts the tokens of one answer up to and with the one that completes `</think>`.

    Its text says whether and where thoughts end, as `ReasoningParser` reads it, so that the count
    and the thoughts that are shown agree. As text may come later than its tokens, and in one piece
    with more, the token is looked for once, when they have ended.

    Args:
        tokenizer: That made the text.
        skip_special_tokens: As it was made.

    Attributes:
        num_tokens: Of what was read so far; until thoughts end, with tokens whose text is to come.
            Thoughts that never end are the whole answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # All so far; None once their number is certain.
        self._token_ids: list[int] | None = []
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer; their text may come later."""
        if self._token_ids is not None:
            self._token_ids += token_ids

    def note(self, parser: ReasoningParser) -> None:
        """Counts, after the parser has read what there is of the text."""
        if self._token_ids is None:
            return
        if parser.stage == "thoughts":
            self.num_tokens = len(self._token_ids)
        elif parser.stage == "answer":
            self.num_tokens = self._num_to_end(self._token_ids) if parser.had_thoughts else 0
            self._token_ids = None

    def _num_to_end(self, token_ids: list[int]) -> int:
        """Tokens of the shortest beginning whose text has the tag."""
        end_id = self._tokenizer.token_to_id(THOUGHTS_END)
        if end_id in token_ids:
            num_tokens = token_ids.index(end_id) + 1
            # A model may have spelled it before, which ends its thoughts too.
            if not self._has_end(token_ids[: num_tokens - 1]):
                return num_tokens
        return bisect.bisect_left(
            range(len(token_ids)), True, key=lambda num: self._has_end(token_ids[:num])
        )

    def _has_end(self, token_ids: list[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return THOUGHTS_END in text
