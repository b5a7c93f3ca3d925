"""Requests that could never finish are rejected, with numbers in the error."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.contracts.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.errors import InvalidRequestError, NeverFitsError, PromptTooLongError
from paxkv.scheduler.limits import RequestLimits, make_request_limits


def full(block_size=4):
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def window(num_tokens, block_size=4):
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype="float32",
        sliding_window=num_tokens,
    )


def make_limits(**changes):
    limits = {
        "max_model_len": 32,
        "max_prompt_tokens": None,
        "max_num_batched_tokens": 8,
        "num_usable_blocks": 4,
        "kv_cache_specs": (full(),),
    }
    return RequestLimits(**(limits | changes))


def make_request(num_prompt_tokens, max_tokens, **fields):
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1] * num_prompt_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        **fields,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_groups", "expected"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 1), (5, 1, 2), (5, 3, 6)],
)
def test_whole_blocks_of_every_group_are_counted(num_tokens, num_groups, expected):
    limits = make_limits(kv_cache_specs=(full(),) * num_groups)
    assert limits.required_blocks(num_tokens) == expected


def test_each_group_counts_in_its_own_block_size():
    # 9 tokens: 3 blocks of 4 and 2 of 8.
    assert make_limits(kv_cache_specs=(full(4), full(8))).required_blocks(9) == 5


def test_a_window_needs_blocks_only_for_itself_and_one_step():
    # Window 5 and steps of 8: 12 tokens are 3 blocks, and one more as they may start in a block.
    limits = make_limits(kv_cache_specs=(window(5),), max_model_len=1000)
    assert [limits.required_blocks(n) for n in (4, 12, 16, 17, 900)] == [1, 3, 4, 4, 4]
    limits.check(make_request(500, 400))
    assert limits.max_tokens_that_fit >= 1000
    # With a full attention group: 4 + 4 blocks for 16 tokens, 4 + 5 for 17.
    both = make_limits(kv_cache_specs=(full(), window(5)), num_usable_blocks=8, max_model_len=99)
    assert both.max_tokens_that_fit == 16
    both.check(make_request(10, 7))
    with pytest.raises(NeverFitsError, match="may need 9 KV cache blocks; there are 8, for 16"):
        both.check(make_request(10, 8))


def test_lookahead_slots_must_fit_too():
    # A window of 5 and a step of 8 + 3: 15 tokens are 4 blocks, and one more.
    window_limits = make_limits(
        kv_cache_specs=(window(5),), num_lookahead_tokens=3, max_model_len=1000
    )
    assert window_limits.required_blocks(900) == 5
    limits = make_limits(num_lookahead_tokens=3)
    limits.check(make_request(10, 4))
    with pytest.raises(NeverFitsError, match="may need 5 KV cache blocks"):
        limits.check(make_request(10, 5))


def test_an_item_that_no_step_can_encode_is_rejected():
    def with_item(num_tokens):
        item = MultiModalFeature(identifier="i", offset=0, length=num_tokens)
        return make_request(9, 2, mm_features=(item,))

    make_limits(max_encoder_tokens=6).check(with_item(6))
    with pytest.raises(
        NeverFitsError, match="7 encoder tokens must be computed in one step, more than the 6"
    ):
        make_limits(max_encoder_tokens=6).check(with_item(7))


@pytest.mark.parametrize(
    ("is_encoder_decoder", "max_num_tokens_in_all"), [(False, 2 * 8), (True, 7)]
)
def test_items_of_an_encoder_decoder_must_be_encoded_together(
    is_encoder_decoder, max_num_tokens_in_all
):
    cross = CrossAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="float32", max_encoder_tokens=7
    )
    specs = (full(), cross) if is_encoder_decoder else (full(),)
    limits = make_request_limits(
        SchedulerConfig(max_num_encoder_input_tokens=9, encoder_cache_size=8),
        KVCacheConfig(
            num_blocks=50,
            kv_cache_groups=tuple(
                KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=spec) for spec in specs
            ),
        ),
        max_model_len=32,
        num_usable_blocks=49,
        num_lookahead_tokens=0,
    )

    def with_items(num_tokens):
        lengths = (num_tokens // 2, num_tokens - num_tokens // 2)
        items = [MultiModalFeature(identifier=str(n), offset=0, length=n) for n in lengths]
        return make_request(9, 2, mm_features=tuple(items))

    limits.check(with_items(max_num_tokens_in_all))
    with pytest.raises(NeverFitsError, match="encoder tokens must be computed in one step"):
        limits.check(with_items(max_num_tokens_in_all + 1))


def test_the_largest_request_that_fits_fills_the_pool():
    assert make_limits().max_tokens_that_fit == 16
    assert make_limits(kv_cache_specs=(full(),) * 2).max_tokens_that_fit == 8
    assert make_limits(kv_cache_specs=(full(),) * 3).max_tokens_that_fit == 4
    assert make_limits(num_usable_blocks=100).max_tokens_that_fit == 400
    # The last token needs no slot.
    make_limits().check(make_request(10, 7))
    with pytest.raises(NeverFitsError, match="may need 5 KV cache blocks; there are 4, for 16"):
        make_limits().check(make_request(10, 8))


def test_length_is_limited_by_max_model_len_before_the_check():
    limits = make_limits(max_model_len=17)
    assert limits.max_num_tokens(make_request(10, 1000)) == 17
    assert limits.max_num_tokens(make_request(10, None)) == 17
    assert limits.max_num_tokens(make_request(10, 3)) == 13
    limits.check(make_request(10, 1000))


def test_a_prompt_must_leave_room_for_a_token():
    limits = make_limits(num_usable_blocks=100)
    limits.check(make_request(31, 5))
    with pytest.raises(
        PromptTooLongError, match="too long: 32 tokens > 31 max.*context length is 32"
    ):
        limits.check(make_request(32, 5))


def test_an_empty_prompt_is_rejected():
    with pytest.raises(InvalidRequestError, match="no tokens"):
        make_limits().check(make_request(0, 5))


def test_a_prompt_that_must_not_be_split_must_fit_in_a_step():
    limits = make_limits(max_prompt_tokens=8)
    limits.check(make_request(8, 2))
    with pytest.raises(PromptTooLongError, match="9 tokens > 8 max.* fit in one step") as caught:
        limits.check(make_request(9, 2))
    assert caught.value.param == "prompt"


def test_a_fork_may_be_longer_than_a_step():
    # In beam search, each new request of a beam is one token longer.
    make_limits(max_prompt_tokens=8).check(make_request(9, 2, fork_from="source"))
