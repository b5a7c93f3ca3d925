"""Arrays of a compiled generation hold what changes logits only where a request asks for it."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner.batch.generate_inputs import GenerateShape, make_generate_inputs

SHAPE = GenerateShape(batch_size=3, max_prompt_len=4, max_new_tokens=5)
PLAIN = SamplingParams(temperature=0.9, top_k=3, max_tokens=5, stop_token_ids=[7], seed=1)


def inputs_of(*params: SamplingParams):
    requests = [
        EngineRequest(request_id=str(row), prompt_token_ids=[1, 2], sampling_params=param)
        for row, param in enumerate(params)
    ]
    return make_generate_inputs(requests, SHAPE, vocab_size=40, seed=0)


def test_no_row_generates_more_than_the_shape_has_room_for() -> None:
    inputs = inputs_of(SamplingParams(max_tokens=5), SamplingParams(max_tokens=9))
    assert inputs.max_new_tokens.tolist() == [5, 5, 1]


def test_plain_requests_take_the_program_without_processors() -> None:
    assert inputs_of(PLAIN, PLAIN).packed_rows is None


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}], ids=str
)
def test_one_row_that_asks_is_the_only_one_packed(fields) -> None:
    changed = SamplingParams(max_tokens=5, stop_token_ids=[7], **fields)
    packed_rows_np = inputs_of(PLAIN, changed).packed_rows
    assert packed_rows_np.any(axis=1).tolist() == [False, True, False]
