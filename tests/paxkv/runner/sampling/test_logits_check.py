"""Logits that are not finite are found by the log-probability of the drawn token."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.sampling.logits_check import LogitsCheck
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampling_columns import SamplingInputs, encode_sampling_params
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS
from tests.quick_compile import quick_jit

VOCAB = 200
SAMPLE = quick_jit(lambda logits, inputs: pack_result(sample(logits, inputs)))


def look(check, logprobs, *, num_drawn=None, req_ids=("a", "b"), unfinished=("a", "b")):
    """A step that drew tokens with these log-probabilities, [max_steps][num_reqs]."""
    logprobs_np = np.array(logprobs, np.float32)
    # The last row is padding, which the check must not read.
    result_np = np.full((len(logprobs_np), len(req_ids) + 1, RESULT_WIDTH), NO_TOKEN, np.int32)
    result_np[:, : len(req_ids), 0] = 7
    result_np[:, : len(req_ids), 1] = logprobs_np.view(np.int32)
    num_drawn_np = np.array([len(logprobs)] * len(req_ids) if num_drawn is None else num_drawn)
    check.count(list(req_ids), num_drawn_np, result_np, unfinished=unfinished)
    return check.num_corrupted_requests


def test_each_request_is_counted_once():
    check = LogitsCheck()
    assert look(check, [[-1.0, -0.0]]) == 0
    assert look(check, [[-1.0, np.nan]]) == 1
    assert look(check, [[-1.0, np.nan]]) == 1
    assert look(check, [[np.nan, -1.0]]) == 2


def test_another_request_with_the_same_id_is_counted_again():
    check = LogitsCheck()
    assert look(check, [[np.nan]], req_ids=("a",)) == 1
    look(check, [[-1.0]], req_ids=("b",), unfinished=("b",))
    assert look(check, [[np.nan]], req_ids=("a",)) == 2


def test_only_drawn_tokens_are_checked():
    check = LogitsCheck()
    assert look(check, [[-1.0, np.nan], [np.nan, np.nan]], num_drawn=[1, 0]) == 0
    assert look(check, [[-1.0, np.nan], [np.nan, np.nan]], num_drawn=[2, 0]) == 1


def test_request_that_ends_inside_a_burst_is_not_counted():
    """The device fills the rest of its rows with NO_TOKEN, which is NaN as a float."""
    check = LogitsCheck()
    result_np = np.full((8, 2, RESULT_WIDTH), NO_TOKEN, np.int32)
    result_np[0, 0, :2] = 7, np.float32(-1.0).view(np.int32)
    check.count(["a"], np.array([8]), result_np, unfinished=("a",))
    assert check.num_corrupted_requests == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_the_sampler_shows_bad_logits_to_rows_that_ask(bad, temperature):
    """The -inf of a mask and large finite numbers are valid."""
    params = SamplingParams(temperature=temperature)
    row_np = encode_sampling_params(params, seed=1, vocab_size=VOCAB)
    rows_np = np.stack([row_np, row_np])
    check = LogitsCheck()
    check.request_logprobs(rows_np)
    logits_np = np.zeros((2, VOCAB), np.float32)
    logits_np[1, 150] = bad
    inputs = SamplingInputs(rows=jnp.asarray(rows_np), draw_position=jnp.array([5, 5]))
    result_np = np.asarray(SAMPLE(logits_np, inputs))[None]
    check.count(["a", "b"], np.array([1, 1]), result_np, unfinished=("a", "b"))
    assert check.num_corrupted_requests == (0 if bad in (-np.inf, 1e30) else 1)


def test_every_row_requests_logprobs():
    rows_np = np.zeros((3, NUM_COLUMNS), np.int32)
    LogitsCheck().request_logprobs(rows_np)
    inputs = SamplingInputs(rows=jnp.asarray(rows_np), draw_position=jnp.zeros(3, jnp.int32))
    assert inputs.wants_logprobs.all()
