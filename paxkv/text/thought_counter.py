"""`ThoughtCounter`: counts the tokens of an answer's thoughts."""

import bisect
from collections.abc import Sequence

from paxkv.text.reasoning_parser import THOUGHTS_END, ReasoningParser
from paxkv.text.tokenizer import Tokenizer


class ThoughtCounter:
    """Counts the tokens of one answer up to and including the one that completes `</think>`.

    `ReasoningParser` decides from the text whether and where thoughts end, so the count matches
    the thoughts that are shown. Text may arrive later than its tokens, and together with further
    text. Therefore the counter searches for the last token once, when the thoughts have ended.

    Args:
        tokenizer: The tokenizer that produced the text.
        skip_special_tokens: The value with which the text was decoded.

    Attributes:
        num_tokens: Number of tokens of the thoughts read so far. Until the thoughts end, it
            includes tokens whose text has not arrived. If they never end, all tokens count.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # All tokens so far; None when the number is final.
        self._token_ids: list[int] | None = []
        self.num_tokens = 0

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the answer. Their text may arrive later."""
        if self._token_ids is not None:
            self._token_ids += token_ids

    def update(self, parser: ReasoningParser) -> None:
        """Updates the count, after the parser has read the text that has arrived."""
        if self._token_ids is None:
            return
        if parser.stage == "thoughts":
            self.num_tokens = len(self._token_ids)
        elif parser.stage == "answer":
            self.num_tokens = self._num_to_end(self._token_ids) if parser.had_thoughts else 0
            self._token_ids = None

    def _num_to_end(self, token_ids: list[int]) -> int:
        """Number of tokens of the shortest beginning whose text contains `</think>`."""
        end_id = self._tokenizer.token_to_id(THOUGHTS_END)
        if end_id in token_ids:
            num_tokens = token_ids.index(end_id) + 1
            # The thoughts end earlier if the model has spelled `</think>` with other tokens before.
            if not self._has_end(token_ids[: num_tokens - 1]):
                return num_tokens
        return bisect.bisect_left(
            range(len(token_ids)), True, key=lambda num: self._has_end(token_ids[:num])
        )

    def _has_end(self, token_ids: list[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return THOUGHTS_END in text
