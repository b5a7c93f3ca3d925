"""Log-probabilities of a prompt equal a dense computation, however it was computed."""

import jax
import numpy as np
import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import NewRequestData, SchedulerOutput
from paxkv.runner.features.prompt_logprobs import PromptLogprobs
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from tests.paxkv.no_cached import NO_CACHED
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.shared_runners import MAX_NUM_BATCHED_TOKENS
from tests.paxkv.runner.tiny_model import VOCAB

# Five tokens at a time, all at once, and a tile at a time.
on_every_runner = pytest.mark.parametrize(
    "warm", ["one_group", "three_groups", "batch_invariant"], indirect=True
)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def check(model, prompt_ids, found, num_logprobs):
    logits_np = model.dense_logits(prompt_ids)[:-1]
    shifted_np = logits_np - logits_np.max(axis=1, keepdims=True)
    true_np = shifted_np - np.log(np.exp(shifted_np).sum(axis=1, keepdims=True))
    assert len(found) == len(prompt_ids) - 1
    for row_np, token_id, logprobs in zip(true_np, prompt_ids[1:], found, strict=True):
        np.testing.assert_allclose(logprobs.token_logprob, row_np[token_id], rtol=1e-4, atol=1e-3)
        assert logprobs.token_rank == (row_np > row_np[token_id]).sum() + 1
        assert logprobs.top_token_ids == np.argsort(-row_np)[:num_logprobs].tolist()
        np.testing.assert_allclose(
            logprobs.top_logprobs, np.sort(row_np)[::-1][:num_logprobs], rtol=1e-4, atol=1e-3
        )


def asks(num_logprobs, **fields):
    return SamplingParams(temperature=0.0, prompt_logprobs=num_logprobs, **fields)


def test_rows_have_logits_if_requests_may_ask_for_any_number():
    configs = [RunnerConfig(max_logprobs=num_logprobs) for num_logprobs in (20, -1)]
    features = [PromptLogprobs(config, vocab_size=VOCAB) for config in configs]
    widths = [variant.row_width for feature in features for variant in feature.variants()]
    assert widths == [RESULT_WIDTH, RESULT_WIDTH + VOCAB]


@on_every_runner
def test_prompts_in_chunks_get_all_their_logprobs_while_others_run(warm, runner):
    driver = RunnerDriver(runner)
    lengths = {"a": 19, "b": 7, "c": 9}
    params = {"a": asks(3), "b": SamplingParams(temperature=0.0), "c": asks(20)}
    for req_id, length in lengths.items():
        driver.add(req_id, prompt(length, length), params[req_id])
    with jax.transfer_guard("disallow"):
        assert driver.step({"a": 5, "b": 7}).prompt_logprobs == {}
        # "c" begins and ends, "b" decodes.
        output = driver.step({"b": 1, "c": 9, "a": 2})
        assert output.prompt_logprobs.keys() == {"c"}
        check(warm.model, prompt(9, 9), output.prompt_logprobs["c"], 20)
        # All tokens except the last: the log-probabilities exist, but no first token.
        assert driver.step({"a": 11, "c": 1}).prompt_logprobs == {}
        output = driver.step({"a": 1, "b": 1, "c": 1})
        assert output.prompt_logprobs.keys() == {"a"}
        check(warm.model, prompt(19, 19), output.prompt_logprobs["a"], 3)
        assert driver.step({"a": 1, "b": 1, "c": 1}).prompt_logprobs == {}
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


@on_every_runner
def test_prompt_logprobs_do_not_change_tokens(runner):
    outputs = []
    for params in (asks(0), asks(None)):
        driver = RunnerDriver(runner)
        driver.add("a", prompt(3, 17), params)
        outputs.append(driver.run_alone("a", 5, MAX_NUM_BATCHED_TOKENS))
        driver.finish_all()
    assert outputs[0] == outputs[1]


@on_every_runner
def test_prompt_of_one_token_has_none(runner):
    driver = RunnerDriver(runner)
    driver.add("a", [4], asks(2))
    assert driver.step({"a": 1}).prompt_logprobs == {"a": []}
    assert driver.step({"a": 1}).prompt_logprobs == {}
    driver.finish_all()


def new_request(prompt_token_ids):
    """The decision of a step with one new request, "a", that asks for log-probabilities."""
    new_req = NewRequestData(
        req_id="a",
        prompt_token_ids=prompt_token_ids,
        sampling_params=asks(2),
        block_ids=([1],),
        num_computed_tokens=0,
    )
    return SchedulerOutput(
        scheduled_new_reqs=[new_req],
        scheduled_cached_reqs=NO_CACHED,
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
        preempted_req_ids=frozenset(),
        finished_req_ids=frozenset(),
    )


def test_only_steps_with_a_token_before_the_last_need_the_variant():
    """A step with the variant is never a burst, and has the largest number of tokens."""
    feature = PromptLogprobs(RunnerConfig(), vocab_size=VOCAB)
    (variant,) = feature.variants()
    token_ids_np = np.array([[4, 5, 6]], np.int32)
    feature.before_step(new_request(token_ids_np[0].tolist()), None)

    def plan(num_computed, num_scheduled):
        return feature.plan(
            ScheduledRows(
                ["a"],
                rows_np=np.array([0], np.int32),
                num_scheduled_np=np.array([num_scheduled], np.int32),
                num_computed_np=np.array([num_computed], np.int32),
                num_tokens_np=np.array([3], np.int32),
                num_pending_np=np.array([0], np.int32),
                token_ids_np=token_ids_np,
            )
        )

    assert [plan(*step).variant for step in ((0, 2), (1, 2), (2, 1))] == [variant, variant, None]


@on_every_runner
def test_preempted_request_gets_prompt_logprobs_once_with_its_first_token(warm, runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(5, 15), asks(1))
    driver.step({"a": 12})
    driver.preempt("a")
    assert driver.step({"a": 10}).prompt_logprobs == {}
    output = driver.step({"a": 5})
    check(warm.model, prompt(5, 15), output.prompt_logprobs["a"], 1)
    driver.preempt("a")
    driver.step({"a": 12})
    assert driver.step({"a": 4}).prompt_logprobs == {}
    driver.finish_all()
    # The token of the step in flight is dropped. The next token brings them.
    driver.add("b", prompt(6, 8), asks(1))
    handle = runner.execute_model(driver.schedule({"b": 8}))
    driver.preempt("b")
    late = runner.execute_model(driver.schedule({"b": 8}))
    check(warm.model, prompt(6, 8), handle.sample_tokens().prompt_logprobs["b"], 1)
    check(warm.model, prompt(6, 8), late.sample_tokens().prompt_logprobs["b"], 1)
    driver.finish_all()
