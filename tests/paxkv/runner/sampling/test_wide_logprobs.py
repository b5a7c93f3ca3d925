"""More log-probabilities than the device selects, up to all, equal a dense computation."""

import jax
import numpy as np
import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, read_logprobs
from paxkv.runner.sampling.wide_logprobs import append_logits, num_returned_logits
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.tiny_model import VOCAB

# The runners that allow this many.
on_wide_runners = pytest.mark.parametrize(
    "warm", ["three_groups", "batch_invariant"], indirect=True
)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def true_logprobs(model, token_ids):
    logits_np = model.dense_logits(token_ids)
    shifted_np = logits_np - logits_np.max(axis=1, keepdims=True)
    return shifted_np - np.log(np.exp(shifted_np).sum(axis=1, keepdims=True))


def check(row_np, token_id, found, num_logprobs):
    num_top = VOCAB if num_logprobs == -1 else num_logprobs
    np.testing.assert_allclose(found.token_logprob, row_np[token_id], atol=1e-3)
    assert found.token_rank == (row_np > row_np[token_id]).sum() + 1
    assert found.top_token_ids == np.argsort(-row_np)[:num_top].tolist()
    top_np = np.sort(row_np)[::-1][:num_top]
    np.testing.assert_allclose(found.top_logprobs, top_np, rtol=5e-4, atol=1e-3)


# Penalties change what tokens are drawn from; without any, steps of single tokens are bursts.
@pytest.mark.parametrize("frequency_penalty", [0.0, 2.0])
@on_wide_runners
def test_each_request_gets_as_many_as_it_asked_for(warm, runner, frequency_penalty):
    driver = RunnerDriver(runner)
    wanted = {"a": -1, "b": 30, "c": 3}
    lengths = {"a": 6, "b": 4, "c": 4}
    for req_id, num_logprobs in wanted.items():
        driver.add(
            req_id,
            prompt(lengths[req_id], lengths[req_id]),
            SamplingParams(
                temperature=0.0, logprobs=num_logprobs, frequency_penalty=frequency_penalty
            ),
        )
    before = {req_id: prompt(length, length) for req_id, length in lengths.items()}
    with jax.transfer_guard("disallow"):
        for step in (lengths, dict.fromkeys(wanted, 1), dict.fromkeys(wanted, 1)):
            output = driver.step(step)
            for req_id, token_ids, found in zip(
                output.req_ids, output.sampled_token_ids, output.logprobs, strict=True
            ):
                row_np = true_logprobs(warm.model, before[req_id])[-1]
                check(row_np, token_ids[0], found[0], wanted[req_id])
                before[req_id] += token_ids
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


@on_wide_runners
def test_the_next_step_may_start_before_the_logits_are_read(warm, runner):
    driver = RunnerDriver(runner)
    for req_id in ("a", "b"):
        driver.add(req_id, prompt(7, 7), SamplingParams(temperature=0.0, logprobs=-1))
    first = runner.execute_model(driver.schedule({"a": 7}))
    second = runner.execute_model(driver.schedule({"b": 7}))
    for handle in (first, second):
        output = handle.sample_tokens()
        check(
            true_logprobs(warm.model, prompt(7, 7))[-1],
            output.sampled_token_ids[0][0],
            output.logprobs[0][0],
            -1,
        )
    driver.finish_all()


@on_wide_runners
def test_prompts_in_chunks_get_all_their_logprobs(warm, runner):
    driver = RunnerDriver(runner)
    wanted = {"a": -1, "b": 2}
    for req_id, num_logprobs in wanted.items():
        params = SamplingParams(temperature=0.0, prompt_logprobs=num_logprobs)
        driver.add(req_id, prompt(9, 17), params)
    driver.step({"a": 7, "b": 7})
    driver.step({"a": 7, "b": 7})
    found = driver.step({"a": 3, "b": 3}).prompt_logprobs
    rows_np = true_logprobs(warm.model, prompt(9, 17))
    for req_id, num_logprobs in wanted.items():
        assert len(found[req_id]) == 16
        for row_np, token_id, logprobs in zip(
            rows_np, prompt(9, 17)[1:], found[req_id], strict=False
        ):
            check(row_np, token_id, logprobs, num_logprobs)
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


def test_of_equally_likely_tokens_the_lowest_id_comes_first():
    logits_np = np.zeros((1, 40), np.float32)
    logits_np[0, 7] = 1.0
    first_draw_np = np.zeros(1, np.int32)
    result_np = append_logits(np.zeros((1, 1, RESULT_WIDTH), np.int32), logits_np, first_draw_np)
    found = read_logprobs(result_np[0, 0], 25)
    assert found.top_token_ids == [7, *range(7), *range(8, 25)]


def test_logits_are_those_of_each_requests_own_draws():
    """The last request has one draw of two, so that the rows end before its second one."""
    logits_np = np.arange(3, dtype=np.float32)[:, None].repeat(5, axis=1)
    result_np = np.zeros((2, 2, RESULT_WIDTH), np.int32)
    rows_np = append_logits(result_np, logits_np, np.array([0, 2], np.int32))
    found_np = rows_np[..., RESULT_WIDTH:].view(np.float32)
    assert found_np.shape == (2, 2, 5)
    assert (found_np[:, 0, 0] == [0, 1]).all()
    assert (found_np[0, 1] == 2).all()


def test_programs_return_logits_only_if_the_setting_needs_them():
    counts = {n: num_returned_logits(RunnerConfig(max_logprobs=n), 50) for n in (0, 20, 21, -1)}
    assert counts == {0: 0, 20: 0, 21: 50, -1: 50}
