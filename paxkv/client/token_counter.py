"""`TokenCounter`: counts the tokens of all requests as steps deliver them."""

import bisect
from collections.abc import Mapping, Sequence

from paxkv.contracts.request_output import TOKEN_BUCKETS_S, TokenTotals

_SUMMED_FIELDS = (
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_recomputed_prompt_tokens",
    "num_generation_tokens",
    "token_latency_sum_s",
)


class TokenCounter:
    """Counts the tokens of one engine, and of the engines that replace it."""

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._num_recomputed_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._latency_counts = [0] * (len(TOKEN_BUCKETS_S) + 1)
        self._latency_sum_s = 0.0

    @property
    def totals(self) -> TokenTotals:
        return TokenTotals(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            num_recomputed_prompt_tokens=self._num_recomputed_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            token_latency_counts=tuple(self._latency_counts),
            token_latency_sum_s=self._latency_sum_s,
        )

    def count_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts a prompt when its request's first token arrives."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_prompt_tokens += min(num_cached_tokens, num_tokens)
        # The last token is recomputed if all others were cached. Prompts of one token do not count.
        self._num_recomputed_prompt_tokens += 0 < num_cached_tokens == num_tokens - 1

    def count_step(
        self, num_completions: Mapping[tuple[int, float | None], int], now_s: float
    ) -> None:
        """Counts the new tokens of a step. Completions with equal values form one group.

        Args:
            num_completions: (new tokens, time of the token before them) -> number of completions.
                {(1, 7.5): 255, (1, None): 1} means 255 that continue and one that starts.
            now_s: Time of this step, in seconds on the same monotonic clock.
        """
        for (num_tokens, last_token_s), count in num_completions.items():
            self._num_generation_tokens += num_tokens * count
            if last_token_s is None:
                continue
            # Tokens that arrive together each count an equal share of the time.
            waited_s = now_s - last_token_s
            bucket = bisect.bisect_left(TOKEN_BUCKETS_S, waited_s / num_tokens)
            self._latency_counts[bucket] += num_tokens * count
            self._latency_sum_s += waited_s * count


def sum_totals(all_totals: Sequence[TokenTotals]) -> TokenTotals:
    """Sums the totals of all engines; `engines` has each engine's totals if there are several."""
    if len(all_totals) == 1:
        return all_totals[0]
    counts = zip(*(totals.token_latency_counts for totals in all_totals), strict=True)
    return TokenTotals(
        **{name: sum(getattr(totals, name) for totals in all_totals) for name in _SUMMED_FIELDS},
        token_latency_counts=tuple(map(sum, counts)),
        engines=tuple(all_totals),
    )
