"""Counts of groups of tokens equal the counts of single tokens."""

import pytest

from paxkv.client.token_counter import TokenCounter, sum_totals
from paxkv.contracts.request_output import TOKEN_BUCKETS_S, TokenTotals


def test_totals_are_zero_before_the_first_step() -> None:
    assert TokenCounter().totals == TokenTotals()


def test_tokens_of_a_step_share_its_latency_except_first_tokens() -> None:
    counter = TokenCounter()
    # Three completions start; one has a token after 0.25 s; two have four tokens after 0.5 s.
    counter.count_step({(1, None): 3, (1, 9.75): 1, (4, 9.5): 2}, 10.0)
    counter.count_step({(2, 10.0): 1}, 400.0)
    totals = counter.totals
    assert totals.num_generation_tokens == 3 + 1 + 8 + 2
    counts = dict(zip((*TOKEN_BUCKETS_S, None), totals.token_latency_counts, strict=True))
    # 0.25 s, 0.125 s and 195 s.
    assert {bound: count for bound, count in counts.items() if count} == {0.3: 1, 0.15: 8, None: 2}
    assert totals.token_latency_sum_s == pytest.approx(0.25 + 2 * 0.5 + 390.0)


def test_cached_tokens_are_limited_by_the_prompt_length() -> None:
    counter = TokenCounter()
    counter.count_prompt(10, 4)
    counter.count_prompt(3, 5)
    totals = counter.totals
    assert (totals.num_prompt_tokens, totals.num_cached_prompt_tokens) == (13, 7)
    assert totals.num_computed_prompt_tokens == 6


def test_last_token_is_recomputed_if_all_others_were_cached() -> None:
    counter = TokenCounter()
    # A prompt of one token, and one that was cached completely, do not count.
    for num_tokens, num_cached_tokens in ((17, 16), (18, 16), (33, 32), (1, 0), (3, 3)):
        counter.count_prompt(num_tokens, num_cached_tokens)
    assert counter.totals.num_recomputed_prompt_tokens == 2


def test_totals_of_several_engines_are_summed_and_listed() -> None:
    first, second = TokenCounter(), TokenCounter()
    first.count_prompt(17, 16)
    first.count_step({(1, None): 3}, 1.0)
    second.count_prompt(10, 4)
    second.count_step({(2, 0.0): 1}, 0.5)
    both = sum_totals([first.totals, second.totals])
    assert both == TokenTotals(
        num_prompt_tokens=27,
        num_cached_prompt_tokens=20,
        num_recomputed_prompt_tokens=1,
        num_generation_tokens=5,
        token_latency_counts=second.totals.token_latency_counts,
        token_latency_sum_s=0.5,
        engines=(first.totals, second.totals),
    )
    assert sum_totals([first.totals]) == first.totals
