"""Stopping: the token that ends a request, the reason, and the tokens after it."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import NO_TOKEN_LEFT
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.scheduler_output import ModelRunnerOutput, TokenLogprobs
from paxkv.kv_cache.hashing.block_hash import BlockHasher
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.update import (
    append_plain,
    append_until_stop,
    check_stop,
    num_rejected_tokens,
)

EOS = 2


def make_request(*, max_num_tokens=10, block_hasher=None, bad_words=(), scarce=(), **params):
    request = Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[EOS, 50, 60],
            sampling_params=SamplingParams(**params),
            eos_token_ids=(EOS, 3),
            bad_words_token_ids=bad_words,
            scarce_token_ids=scarce,
        ),
        max_num_tokens=max_num_tokens,
        block_hasher=block_hasher,
    )
    request.status = RequestStatus.RUNNING
    request.num_cached_tokens = 1
    return request


@pytest.mark.parametrize(
    ("params", "token_id", "expected"),
    [
        ({}, 7, None),
        ({}, EOS, ("stop", None)),
        # A further EOS token of the model is a stop token.
        ({}, 3, ("stop", 3)),
        ({"ignore_eos": True}, EOS, None),
        ({"ignore_eos": True}, 3, None),
        ({"stop_token_ids": [7, 8]}, 8, ("stop", 8)),
        # EOS is checked first, unless it is ignored.
        ({"stop_token_ids": [EOS]}, EOS, ("stop", None)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, ("stop", EOS)),
        # At the last possible token, a stop is still a stop.
        ({"max_num_tokens": 4}, 7, ("length", None)),
        ({"max_num_tokens": 4}, EOS, ("stop", None)),
        ({"max_num_tokens": 4, "stop_token_ids": [7]}, 7, ("stop", 7)),
        ({"max_num_tokens": 5}, 7, None),
    ],
)
def test_the_first_matching_rule_ends_the_request(params, token_id, expected):
    request = make_request(**params)
    request.append_output_tokens([token_id])
    assert check_stop(request) == expected


def test_tokens_after_the_stop_token_are_dropped():
    request = make_request(stop_token_ids=[9])
    result = append_until_stop(request, [7, 9, 8], None)
    assert result.new_token_ids == [7, 9]
    assert (result.finish_reason, result.stop_reason) == ("stop", 9)
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, 9)
    assert request.all_token_ids == [EOS, 50, 60, 7, 9]


def test_a_request_ends_if_no_token_is_allowed():
    """Only 7 is allowed, and not three times in a row."""
    settings = {"bad_words": ((9,), (7, 7, 7)), "scarce": (7,)}
    request = make_request(**settings)
    result = append_until_stop(request, [7, 7, 0], None)
    assert (result.new_token_ids, result.finish_reason) == ([7, 7], "stop")
    assert result.stop_reason == request.stop_reason == NO_TOKEN_LEFT
    assert request.status is RequestStatus.FINISHED_STOPPED
    # Other reasons have precedence.
    for ends, expected in (
        ({"max_num_tokens": 4}, ("length", None)),
        ({"stop_token_ids": [7]}, ("stop", 7)),
    ):
        request = make_request(bad_words=((7, 7),), scarce=(7,), **ends)
        append_until_stop(request, [7], None)
        assert (request.finish_reason, request.stop_reason) == expected


def test_eos_below_min_tokens_is_not_an_allowed_token():
    settings = {"bad_words": ((7, 7),), "stop_token_ids": [9], "scarce": (7, 9)}
    for min_tokens, expected in ((1, None), (2, ("stop", NO_TOKEN_LEFT))):
        request = make_request(min_tokens=min_tokens, **settings)
        request.append_output_tokens([7])
        assert check_stop(request) == expected


def test_several_tokens_are_cut_at_the_length_limit():
    request = make_request(max_num_tokens=5)
    result = append_until_stop(request, [7, 8, 9], None)
    assert (result.new_token_ids, result.finish_reason) == ([7, 8], "length")
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_continuing_request_reports_its_tokens():
    request = make_request()
    result = append_until_stop(request, [7, 8], None)
    assert (result.request_id, result.new_token_ids) == ("r", [7, 8])
    assert (result.finish_reason, result.stop_reason, result.logprobs) == (None, None, None)
    assert result.num_cached_tokens == 1
    assert request.status is RequestStatus.RUNNING


def test_outputs_contain_the_number_of_preemptions():
    request = make_request(max_tokens=9)
    request.num_preemptions = 2
    assert append_until_stop(request, [70], None).num_preemptions == 2
    assert plain_output(request, [71], None).num_preemptions == 2


def plain_output(request, token_ids, logprobs):
    request.num_computed_tokens = request.num_tokens
    step = ModelRunnerOutput(req_ids=["r"], sampled_token_ids=[token_ids], logprobs=[logprobs])
    outputs, places = append_plain({"r": request}, step, {"r": len(token_ids)})
    assert places == ([0] if outputs[0] is None else [])
    return outputs[0]


def test_append_plain_and_append_until_stop_agree():
    logprobs = [TokenLogprobs(token_logprob=0.0, token_rank=1, top_token_ids=[], top_logprobs=[])]
    plain, other = make_request(), make_request()
    plain.num_output_placeholders = 3
    assert plain_output(plain, [7], logprobs) == append_until_stop(other, [7], logprobs)
    assert plain_output(plain, [8, 9], None) == append_until_stop(other, [8, 9], None)
    assert plain.all_token_ids == other.all_token_ids == [EOS, 50, 60, 7, 8, 9]
    assert plain.num_output_placeholders == 0


@pytest.mark.parametrize(
    ("token_ids", "settings"),
    [
        ([EOS], {}),
        ([7, 3, 8], {}),
        ([7], {"stop_token_ids": [7]}),
        # Also below min_tokens, such a token needs a check.
        ([EOS], {"min_tokens": 5}),
        ([7, 8], {"max_num_tokens": 5}),
        ([7], {"block_hasher": BlockHasher(block_size=4, seed="")}),
        ([7, 8, 9], {"block_hasher": BlockHasher(block_size=5, seed="")}),
        # After each token, no token may be allowed, also in the middle of a block.
        ([7], {"scarce": (7, 8), "bad_words": ((7, 7), (7, 8))}),
        (
            [7],
            {
                "scarce": (7,),
                "bad_words": ((7, 7),),
                "block_hasher": BlockHasher(block_size=5, seed=""),
            },
        ),
    ],
)
def test_tokens_that_need_a_check_are_not_plain(token_ids, settings):
    request = make_request(**settings)
    assert plain_output(request, token_ids, None) is None
    assert request.all_token_ids == [EOS, 50, 60] and not request.block_hashes


def test_a_full_block_is_hashed_if_no_token_ends_the_request():
    request = make_request(block_hasher=BlockHasher(block_size=2, seed=""))
    append_until_stop(request, [7, 8, 9], None)
    assert len(request.block_hashes) == 3
    assert plain_output(request, [7], None) is not None
    assert plain_output(request, [7], None) is None


def test_a_burst_without_tokens_ends_no_request():
    request = make_request()
    request.append_output_tokens([EOS])
    result = append_until_stop(request, [], None)
    assert (result.new_token_ids, result.finish_reason) == ([], None)


def test_logprobs_of_dropped_tokens_are_dropped():
    logprobs = [
        TokenLogprobs(token_logprob=-float(i), token_rank=1, top_token_ids=[], top_logprobs=[])
        for i in range(3)
    ]
    result = append_until_stop(make_request(), [7, EOS, 8], logprobs)
    assert result.logprobs == logprobs[:2]


@pytest.mark.parametrize(
    ("token_id", "num_tokens", "expected"),
    [(EOS, 1, None), (9, 1, None), (EOS, 2, ("stop", None)), (9, 2, ("stop", 9))],
)
def test_below_min_tokens_only_the_length_limit_ends_a_request(token_id, num_tokens, expected):
    request = make_request(stop_token_ids=[9])
    request.min_tokens = 2
    for _ in range(num_tokens - 1):
        request.append_output_tokens([7])
    request.append_output_tokens([token_id])
    assert check_stop(request) == expected
    request.min_tokens, request.max_num_tokens = 9, request.num_tokens
    assert check_stop(request) == ("length", None)


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [
        ([], [7], 0),
        ([7, 8, 9], [7, 8, 9, 5], 0),
        ([7, 8, 9], [7, 4], 2),
        ([7, 8, 9], [4], 3),
        ([7], [], 0),
        ([7], [7, 8, 9], 0),
    ],
)
def test_drafts_after_the_first_wrong_draft_are_rejected(drafts, sampled, expected):
    assert num_rejected_tokens(len(drafts), len(sampled)) == expected
