"""`TokenCounter`: tokens of all requests, counted when a step brings them."""

import bisect
from collections.abc import Mapping, Sequence

from paxkv.contracts.request_output import TOKEN_BUCKETS_S, TokenTotals

_NUMBERS = (
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_recomputed_prompt_tokens",
    "num_generation_tokens",
    "token_latency_sum_s",
)


class TokenCounter:
    """Lives as long as its client, which may see several engines begin and end."""

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
        """Counts a prompt whose first token has come."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_prompt_tokens += min(num_cached_tokens, num_tokens)
        # Of a prompt of one token none was cached.
        self._num_recomputed_prompt_tokens += 0 < num_cached_tokens == num_tokens - 1

    def count_step(
        self, num_completions: Mapping[tuple[int, float | None], int], now_s: float
    ) -> None:
        """Counts the new tokens of a step, with its completions in groups: mostly there is one.

        Args:
            num_completions: By how many tokens each got, and when the one before them had come:
                {(1, 7.5): 255, (1, None): 1} is 255 that go on and one that begins.
            now_s: Seconds, on the same clock, which nobody sets.
        """
        for (num_tokens, last_token_s), num_alike in num_completions.items():
            self._num_generation_tokens += num_tokens * num_alike
            if last_token_s is None:
                continue
            # Tokens that come together took their share each.
            waited_s = now_s - last_token_s
            bucket = bisect.bisect_left(TOKEN_BUCKETS_S, waited_s / num_tokens)
            self._latency_counts[bucket] += num_tokens * num_alike
            self._latency_sum_s += waited_s * num_alike


def sum_totals(all_totals: Sequence[TokenTotals]) -> TokenTotals:
    """Those of all engines together, with those of each where there are several."""
    if len(all_totals) == 1:
        return all_totals[0]
    counts = zip(*(totals.token_latency_counts for totals in all_totals), strict=True)
    return TokenTotals(
        **{name: sum(getattr(totals, name) for totals in all_totals) for name in _NUMBERS},
        token_latency_counts=tuple(map(sum, counts)),
        engines=tuple(all_totals),
    )
