"""Request: its tokens, its hashes and its end."""

from paxkv.contracts.engine_request import EngineRequest
from paxkv.kv_cache.block_hash import BlockHasher
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.request import Request, RequestStatus


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


def test_tokens_are_counted_and_the_prompt_stays_as_it_came():
    prompt = [5, 6, 7]
    request = make_request(prompt)
    request.append_output_token(8)
    request.append_output_token(9)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    assert request.all_token_ids == [5, 6, 7, 8, 9]
    assert prompt == request.prompt_token_ids == [5, 6, 7]


def test_hashes_follow_the_tokens_as_they_are_sampled():
    hasher = BlockHasher(block_size=2, seed="s")
    request = make_request([1, 2, 3], block_hasher=hasher, cache_salt="t")
    assert len(request.block_hashes) == 1
    request.append_output_token(4)
    whole = make_request([1, 2, 3, 4], block_hasher=hasher, cache_salt="t")
    assert request.block_hashes == whole.block_hashes
    assert len(whole.block_hashes) == 2
    assert make_request([1, 2, 3, 4], block_hasher=hasher).block_hashes != whole.block_hashes


def test_without_a_hasher_there_are_no_hashes():
    assert make_request([1] * 9).block_hashes == []


def test_ignore_eos_leaves_the_stop_tokens():
    assert make_request([1]).eos_token_ids == {2, 3}
    request = make_request([1], ignore_eos=True, stop_token_ids=[2])
    assert (request.eos_token_ids, request.stop_token_ids) == (frozenset(), {2})


def test_every_finish_reason_is_an_end():
    for reason, status in (
        ("stop", RequestStatus.FINISHED_STOPPED),
        ("length", RequestStatus.FINISHED_LENGTH_CAPPED),
        ("abort", RequestStatus.FINISHED_ABORTED),
        ("error", RequestStatus.FINISHED_ERROR),
    ):
        request = make_request([1])
        for unfinished in (RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING):
            request.status = unfinished
            assert not request.is_finished
        request.finish(reason, stop_reason=3)
        assert request.is_finished
        assert (request.status, request.stop_reason) == (status, 3)
    assert "FINISHED_ERROR" in repr(request)
