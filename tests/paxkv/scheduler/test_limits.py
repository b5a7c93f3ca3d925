"""The scheduler's door: what can never run to its end is refused, with numbers."""

import pytest

from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import InvalidRequestError, NeverFitsError, PromptTooLongError
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.limits import RequestLimits, required_blocks


def make_limits(**changes):
    limits = {
        "max_model_len": 32,
        "max_prompt_tokens": None,
        "num_usable_blocks": 4,
        "block_size": 4,
        "num_kv_cache_groups": 1,
    }
    return RequestLimits(**(limits | changes))


def make_request(num_prompt_tokens, max_tokens):
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1] * num_prompt_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_groups", "expected"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 1), (5, 1, 2), (5, 3, 6)],
)
def test_blocks_are_counted_whole_and_in_every_group(num_tokens, num_groups, expected):
    got = required_blocks(num_tokens, block_size=4, num_kv_cache_groups=num_groups)
    assert got == expected


def test_the_largest_request_that_fits_fills_the_pool():
    assert make_limits().max_tokens_that_fit == 16
    assert make_limits(num_kv_cache_groups=2).max_tokens_that_fit == 8
    assert make_limits(num_kv_cache_groups=3).max_tokens_that_fit == 4
    # The last token needs no slot.
    make_limits().check(make_request(10, 7))
    with pytest.raises(NeverFitsError, match="may need 5 KV cache blocks; there are 4, for 16"):
        make_limits().check(make_request(10, 8))


def test_length_is_cut_at_max_model_len_before_it_is_judged():
    limits = make_limits(max_model_len=17)
    assert limits.max_num_tokens(make_request(10, 1000)) == 17
    assert limits.max_num_tokens(make_request(10, None)) == 17
    assert limits.max_num_tokens(make_request(10, 3)) == 13
    limits.check(make_request(10, 1000))


def test_a_prompt_must_leave_room_for_a_token():
    limits = make_limits(num_usable_blocks=100)
    limits.check(make_request(31, 5))
    with pytest.raises(PromptTooLongError, match="32 tokens; with max_model_len=32 it may have 31"):
        limits.check(make_request(32, 5))


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokens"):
        make_limits().check(make_request(0, 5))


def test_a_prompt_that_must_not_be_split_has_to_fit_a_step():
    limits = make_limits(max_prompt_tokens=8)
    limits.check(make_request(8, 2))
    with pytest.raises(InvalidRequestError, match="fit in one step of 8 tokens") as caught:
        limits.check(make_request(9, 2))
    assert caught.value.param == "prompt"
