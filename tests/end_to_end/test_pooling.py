"""A pooled request ends with a result and without a token, in steps that other requests share."""

import dataclasses

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner import model_runner
from paxkv.runner.features.feature_list import make_features
from tests.end_to_end.engine_runs import run
from tests.paxkv.runner.features.pooler import Pooler
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import HIDDEN, TinyModel


@pytest.fixture(scope="module")
def pooling():
    """A warm runner with a `Pooler`, and its model."""
    pooler = Pooler(HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), pooler))
        warm = make_warm_runner(TinyModel(seed=3), has_few_sizes=True)
    return warm.runner, warm.model


def make_request(req_id, length, **fields):
    return EngineRequest(
        request_id=req_id,
        prompt_token_ids=prompt(length, length),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=9),
        **fields,
    )


GENERATING = [make_request("a", 5), make_request("b", 12), make_request("c", 20)]
# Shorter than a step, of one token, and computed in several steps.
POOLED = [
    make_request("p", 6, is_pooled=True),
    make_request("q", 1, is_pooled=True),
    make_request("r", 33, is_pooled=True),
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [None, 8])
def test_pooled_and_generating_requests_in_one_batch(pooling, is_async, num_blocks):
    runner, model = pooling
    alone, _ = run(runner, GENERATING)
    requests = [request for pair in zip(GENERATING, POOLED, strict=True) for request in pair]
    answers, num_preemptions = run(
        runner,
        requests,
        is_async=is_async,
        num_blocks=num_blocks,
        caching=True,
        max_decode_burst=4,
        arrivals=(1, 4, 6, 9),
    )
    assert num_blocks is None or num_preemptions > 0
    for request in GENERATING:
        assert answers[request.request_id] == alone[request.request_id]
    head = np.asarray(model.params[2], np.float64)
    for request in POOLED:
        answer = answers[request.request_id]
        expected = dataclasses.replace(
            answer, token_ids=[], logprobs=[], finish_reason="stop", stop_reason=None
        )
        assert answer == expected
        logits_np = np.array(answer.pooling_output) @ head
        truth_np = model.dense_logits(request.prompt_token_ids)[-1]
        np.testing.assert_allclose(logits_np, truth_np, rtol=1e-3, atol=1e-3)
    assert runner.num_compiles_after_ready == 0
