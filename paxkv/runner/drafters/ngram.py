"""`NgramDrafter`: proposes the tokens that followed a request's last tokens earlier.

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding; the meaning
of both limits is that of vLLM `v1/spec_decode/ngram_proposer.py`.
"""

from collections.abc import Sequence

from paxkv.runner.drafters.base import Drafter, RequestDrafter


class NgramRequest(RequestDrafter):
    """Finds an earlier occurrence of a request's last tokens in its prompt and output.

    The longest match counts: of `longest` tokens, or else of fewer, down to `shortest`. Of several
    matches of the same length, the first in the request counts.

    A dictionary for each length has the place of each n-gram, so a proposal takes the same time for
    any number of tokens. Each token costs an entry of about 200 bytes for each length. The first
    proposal adds the prompt.

    Example: tokens [7, 8, 9, 5, 7, 8] with matches of 2 tokens -> drafts [9, 5, 7, 8].
    """

    def __init__(self, token_ids: Sequence[int], *, shortest: int, longest: int) -> None:
        self._token_ids = list(token_ids)
        # For each length, longest first: n-gram -> number of tokens up to its first end.
        self._ends: dict[int, dict[tuple[int, ...], int]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }
        # `_ends` has all n-grams that end among the first `_num_indexed` tokens.
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def propose(self, max_drafts: int) -> list[int]:
        token_ids = self._token_ids
        # Without the n-gram at the end, which would match itself.
        self._index(len(token_ids) - 1)
        for length, ends in self._ends.items():
            end = ends.get(tuple(token_ids[-length:]))
            if end is not None:
                return token_ids[end : end + max_drafts]
        return []

    def _index(self, num_tokens: int) -> None:
        """Adds the n-grams that end among the first `num_tokens` tokens."""
        for length, ends in self._ends.items():
            for end in range(max(self._num_indexed + 1, length), num_tokens + 1):
                ends.setdefault(tuple(self._token_ids[end - length : end]), end)
        self._num_indexed = max(self._num_indexed, num_tokens)


class NgramDrafter(Drafter):
    """Makes an `NgramRequest` for each request.

    Args:
        shortest: The smallest number of tokens to find.
        longest: The largest number of tokens to find.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def start(self, token_ids: Sequence[int]) -> NgramRequest:
        return NgramRequest(token_ids, shortest=self._shortest, longest=self._longest)

    def end(self, request: RequestDrafter) -> None:
        """Does nothing: a request's n-grams help only this request."""
