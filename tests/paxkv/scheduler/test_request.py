"""Request: its tokens, its block hashes and its end."""

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.kv_cache.hashing.block_hash import BlockHasher
from paxkv.scheduler.request import Request, RequestStatus, make_block_hasher


def make_request(token_ids, *, block_hasher=None, cache_salt=None, **params):
    return Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(**params),
            eos_token_ids=(2, 3),
            cache_salt=cache_salt,
        ),
        max_num_tokens=10,
        block_hasher=block_hasher,
    )


def test_appended_tokens_are_counted_and_the_prompt_does_not_change():
    prompt = [5, 6, 7]
    request = make_request(prompt)
    request.append_output_tokens([8])
    request.append_output_tokens([9])
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.all_token_ids == [5, 6, 7, 8, 9]
    assert prompt == request.prompt_token_ids == [5, 6, 7]


def test_block_hashes_are_extended_when_tokens_are_appended():
    hasher = BlockHasher(block_size=2, seed="s")
    request = make_request([1, 2, 3], block_hasher=hasher, cache_salt="t")
    assert len(request.block_hashes) == 1
    request.append_output_tokens([4])
    whole = make_request([1, 2, 3, 4], block_hasher=hasher, cache_salt="t")
    assert request.block_hashes == whole.block_hashes
    assert len(whole.block_hashes) == 2
    assert make_request([1, 2, 3, 4], block_hasher=hasher).block_hashes != whole.block_hashes


def test_without_a_hasher_there_are_no_hashes():
    assert make_request([1] * 9).block_hashes == []


def test_ignore_eos_keeps_the_stop_tokens():
    request = make_request([1], stop_token_ids=[4])
    assert (request.eos_token_id, request.ending_token_ids) == (2, {2, 3, 4})
    request = make_request([1], ignore_eos=True, stop_token_ids=[2])
    assert (request.eos_token_id, request.ending_token_ids) == (None, {2})


@pytest.mark.parametrize(
    ("reason", "status", "expected"),
    [
        ("stop", RequestStatus.FINISHED_STOPPED, "stop"),
        ("length", RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        ("abort", RequestStatus.FINISHED_ABORTED, "abort"),
        ("error", RequestStatus.FINISHED_ERROR, "error"),
        ("ignored", RequestStatus.FINISHED_IGNORED, "length"),
    ],
)
def test_every_finish_reason_finishes_a_request(reason, status, expected):
    request = make_request([1])
    request.finish(reason, stop_reason=3)
    assert request.is_finished
    assert (request.status, request.stop_reason, request.finish_reason) == (status, 3, expected)
    assert status.name in repr(request)


def test_other_statuses_are_unfinished():
    request = make_request([1])
    unfinished = [s for s in RequestStatus if not s.name.startswith("FINISHED")]
    assert len(unfinished) == 6
    for status in unfinished:
        request.status = status
        assert not request.is_finished
        assert request.finish_reason is None


def test_a_request_with_a_grammar_starts_in_waiting_for_fsm():
    request = Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            needs_grammar=True,
        ),
        max_num_tokens=4,
    )
    assert request.status is RequestStatus.WAITING_FOR_FSM
    assert make_request([1]).status is RequestStatus.WAITING


def test_drafts_are_counted_after_the_tokens():
    request = make_request([5, 6, 7])
    request.spec_token_ids = [8, 9]
    assert (request.num_tokens, request.num_tokens_with_spec) == (3, 5)


def test_eos_and_stop_tokens_are_ending_tokens():
    assert make_request([1], stop_token_ids=[7]).ending_token_ids == {2, 3, 7}
    assert make_request([1], stop_token_ids=[7], ignore_eos=True).ending_token_ids == {7}


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_hasher_is_made_only_with_prefix_caching(enable_caching):
    spec = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_groups=(KVCacheGroupSpec(layer_names=("l",), kv_cache_spec=spec),),
        hash_block_size=4,
    )
    hasher = make_block_hasher(
        CacheConfig(enable_prefix_caching=enable_caching, prefix_caching_seed="s"), config
    )
    assert (hasher is not None) == enable_caching
    if hasher is not None:
        assert hasher.none_hash == BlockHasher(block_size=4, seed="s").none_hash


def test_prompt_logprobs_skip_reading_the_prefix_cache():
    request = make_request([1, 2])
    assert not request.skip_reading_prefix_cache
    # Clients cannot set this field yet; the scheduler has the rule already.
    object.__setattr__(request.sampling_params, "prompt_logprobs", 0)
    assert request.skip_reading_prefix_cache


def test_tokens_are_plain_before_the_next_allocation_and_before_the_last():
    request = make_request([5, 6, 7])  # ends with 10 tokens, of which the last is never computed
    assert request.num_plain_tokens == 0
    for num_tokens, wanted in ((4, 4), (9, 9), (16, 9), (0, 0)):
        request.set_tokens_before_allocate(num_tokens)
        assert request.max_tokens_before_allocate == num_tokens
        assert request.num_plain_tokens == wanted
    request.needs_grammar = True
    request.set_tokens_before_allocate(8)
    assert (request.max_tokens_before_allocate, request.num_plain_tokens) == (8, 0)
