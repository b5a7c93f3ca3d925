"""Impossible states of requests, queues and blocks are detected; possible states pass."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.invariants import check_blocks, check_requests
from paxkv.scheduler.request import Request, RequestStatus
from tests.slow_model.specs import cross, full, make_config, window


def make_request(status, *, num_computed_tokens=0, num_prompt_tokens=4):
    request = Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1] * num_prompt_tokens,
            sampling_params=SamplingParams(),
        ),
        max_num_tokens=8,
    )
    request.status = status
    request.num_computed_tokens = num_computed_tokens
    return request


@pytest.mark.parametrize("computed", [1, 4])
def test_a_running_request_passes(computed):
    request = make_request(RequestStatus.RUNNING, num_computed_tokens=computed)
    check_requests({"r": request}, [request], [])


@pytest.mark.parametrize(
    "status",
    [
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_FSM,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_FORK,
        RequestStatus.PREEMPTED,
    ],
)
def test_a_waiting_request_passes(status):
    request = make_request(status)
    check_requests({"r": request}, [], [request])


@pytest.mark.parametrize(
    ("status", "num_computed_tokens", "num_prompt_tokens"),
    [
        (RequestStatus.WAITING, 1, 4),
        (RequestStatus.RUNNING, 0, 4),
        (RequestStatus.RUNNING, 5, 4),
        (RequestStatus.RUNNING, 1, 8),
        (RequestStatus.FINISHED_STOPPED, 4, 4),
    ],
)
def test_an_impossible_running_request_is_detected(status, num_computed_tokens, num_prompt_tokens):
    request = make_request(
        status, num_computed_tokens=num_computed_tokens, num_prompt_tokens=num_prompt_tokens
    )
    with pytest.raises(InvariantError):
        check_requests({"r": request}, [request], [])


def test_drafts_and_placeholders_may_be_computed():
    request = make_request(RequestStatus.RUNNING, num_computed_tokens=6)
    check_requests({"r": request}, [request], [], {"r": 2})
    request.num_output_placeholders = 1
    check_requests({"r": request}, [request], [], {"r": 1})
    with pytest.raises(InvariantError):
        check_requests({"r": request}, [request], [], {"another": 9})


def test_a_waiting_request_with_tokens_or_running_status_is_detected():
    for request in (
        make_request(RequestStatus.PREEMPTED, num_computed_tokens=1),
        make_request(RequestStatus.RUNNING),
    ):
        with pytest.raises(InvariantError):
            check_requests({"r": request}, [], [request])


def test_waiting_requests_have_computed_tokens_only_with_a_connector():
    loaded = make_request(RequestStatus.WAITING, num_computed_tokens=1)
    check_requests({"r": loaded}, [], [loaded], has_connector=True)
    for request in (
        make_request(RequestStatus.WAITING_FOR_REMOTE_KVS, num_computed_tokens=1),
        make_request(RequestStatus.WAITING_FOR_FORK, num_computed_tokens=1),
    ):
        with pytest.raises(InvariantError):
            check_requests({"r": request}, [], [request], has_connector=True)


def test_a_waiting_request_with_drafts_or_placeholders_is_detected():
    for name, value in (("num_output_placeholders", 1), ("spec_token_ids", [7])):
        request = make_request(RequestStatus.PREEMPTED)
        setattr(request, name, value)
        with pytest.raises(InvariantError):
            check_requests({"r": request}, [], [request])


def test_lost_duplicate_and_unknown_requests_are_detected():
    request = make_request(RequestStatus.WAITING)
    for known, waiting in (
        ({"r": request}, []),
        ({"r": request}, [request, request]),
        ({"r": request}, [make_request(RequestStatus.WAITING)]),
        ({}, [request]),
    ):
        with pytest.raises(InvariantError):
            check_requests(known, [], waiting)


def manager_with_blocks_for(request, num_tokens, *kinds):
    config = make_config(kinds or (full(2), window(3, 2)), 20)
    manager = KVCacheManager(kv_cache_config=config, max_model_len=8, enable_caching=False)
    computed, request.num_computed_tokens = request.num_computed_tokens, 0
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = computed
    return manager


def test_permitted_block_holders_pass():
    running = make_request(RequestStatus.RUNNING, num_computed_tokens=4)
    check_blocks(manager_with_blocks_for(running, 4), [running], [], [])
    loading = make_request(RequestStatus.WAITING_FOR_REMOTE_KVS)
    check_blocks(manager_with_blocks_for(loading, 4), [], [loading], [])
    loaded = make_request(RequestStatus.WAITING, num_computed_tokens=1)
    check_blocks(manager_with_blocks_for(loaded, 4), [], [loaded], [])
    kept = make_request(RequestStatus.FINISHED_STOPPED, num_computed_tokens=4)
    check_blocks(manager_with_blocks_for(kept, 4), [], [], [kept])


def test_blocks_of_encoder_tokens_are_not_compared_with_decoder_tokens():
    running = make_request(RequestStatus.RUNNING, num_computed_tokens=4)
    check_blocks(manager_with_blocks_for(running, 4, full(2), cross(2)), [running], [], [])


def test_too_few_blocks_and_blocks_of_waiting_requests_are_detected():
    running = make_request(RequestStatus.RUNNING, num_computed_tokens=4)
    with pytest.raises(InvariantError):
        check_blocks(manager_with_blocks_for(running, 2), [running], [], [])
    waiting = make_request(RequestStatus.PREEMPTED)
    with pytest.raises(InvariantError):
        check_blocks(manager_with_blocks_for(waiting, 4), [], [waiting], [])
    unfinished = make_request(RequestStatus.RUNNING, num_computed_tokens=4)
    with pytest.raises(InvariantError):
        check_blocks(manager_with_blocks_for(unfinished, 4), [], [], [unfinished])
