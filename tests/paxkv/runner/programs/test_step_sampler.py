"""Tokens drawn from changed logits equal a dense computation for any batching."""

import functools
import random

import jax
import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.executor import GrammarBitmask
from paxkv.errors import InvariantError
from paxkv.runner.programs.step_sampler import StepSampler
from paxkv.runner.sampling.row_state import vocab_words
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.logits_truth import true_logits
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tests.paxkv.runner.tiny_model import VOCAB

NUM_NEW_TOKENS = 10
# They draw two rows at a time, and all at once.
on_both_chunkings = pytest.mark.parametrize("warm", ["one_group", "three_groups"], indirect=True)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices draw all rows at once")
def test_rows_are_drawn_in_chunks_and_all_at_once(one_group, three_groups):
    """Otherwise, the tests below would prove little."""
    chunk_rows = [w.runner._buckets.sampler_shape.chunk_rows for w in (one_group, three_groups)]
    assert chunk_rows == [2, MAX_NUM_SEQS]


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def greedy(**fields):
    return SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, **fields)


def dense_greedy(
    model, prompt_ids, params, num_tokens=NUM_NEW_TOKENS, bad_words=(), early_end_ids=()
):
    """Each most likely token of the changed logits of a dense computation."""
    outputs = []
    for _ in range(num_tokens):
        logits_np = model.dense_logits([*prompt_ids, *outputs])[-1]
        changed_np = true_logits(
            logits_np,
            params,
            prompt_ids,
            outputs,
            bad_words=bad_words,
            early_end_ids=early_end_ids,
        )
        outputs.append(int(changed_np.argmax()))
    return outputs


def prompt_for(model, params, length):
    """The first prompt whose answer these settings change."""
    return next(
        prompt_ids
        for prompt_ids in (prompt(seed, length) for seed in range(1000))
        if dense_greedy(model, prompt_ids, params) != dense_greedy(model, prompt_ids, greedy())
    )


def make_requests(model):
    """Request id -> (prompt, params, more fields). Without the settings, answers would differ."""
    plain = {}
    for seed in range(9):
        plain[seed] = dense_greedy(model, prompt(seed, 3 + seed), greedy())
    assert len({tuple(tokens) for tokens in plain.values()}) > 5
    repetition = greedy(repetition_penalty=1.9)
    presence, frequency = greedy(presence_penalty=2.0), greedy(frequency_penalty=1.7)
    words = ((plain[6][0],), tuple(plain[6][1:3]), tuple(plain[6][:2]))
    return {
        "plain": (prompt(0, 3), greedy(), {}),
        "repetition": (prompt_for(model, repetition, 4), repetition, {}),
        "presence": (prompt_for(model, presence, 5), presence, {}),
        "frequency": (prompt_for(model, frequency, 6), frequency, {}),
        "bias": (prompt(4, 7), greedy(logit_bias={plain[4][0]: -30.0, 11: 3.0}), {}),
        "allowed": (prompt(5, 8), greedy(allowed_token_ids=list(range(0, VOCAB, 3))), {}),
        "bad_words": (prompt(6, 9), greedy(), {"bad_words_token_ids": words}),
        "min_tokens": (
            prompt(7, 10),
            greedy(min_tokens=4),
            {"early_end_ids": tuple(set(plain[7][:5]))},
        ),
        "all": (
            prompt(8, 11),
            greedy(
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                logit_bias={plain[8][1]: 2.0},
                allowed_token_ids=list(range(40)),
                min_tokens=2,
            ),
            {"bad_words_token_ids": words, "early_end_ids": (plain[8][0],)},
        ),
    }


@functools.cache
def requests_and_answers(model):
    """The requests of `make_requests`, and the tokens that a dense computation gives them."""
    requests = make_requests(model)
    answers = {
        req_id: dense_greedy(
            model,
            prompt_ids,
            params,
            bad_words=fields.get("bad_words_token_ids", ()),
            early_end_ids=fields.get("early_end_ids", ()),
        )
        for req_id, (prompt_ids, params, fields) in requests.items()
    }
    # Every field changes something, or the tests below would show nothing.
    for req_id, (prompt_ids, _, _) in requests.items():
        is_plain = answers[req_id] == dense_greedy(model, prompt_ids, greedy())
        assert is_plain == (req_id == "plain")
    return requests, answers


def fetch_tokens(driver, handle):
    output = handle.sample_tokens()
    for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
        driver.tokens[req_id] += token_ids


@on_both_chunkings
def test_random_traffic_draws_what_a_dense_computation_draws(warm, runner):
    """Chunks, order, neighbours, preemption and moved rows change nothing; nothing compiles."""
    requests, expected = requests_and_answers(warm.model)
    rng, driver, num_preemptions = random.Random(3), RunnerDriver(runner), 0
    for req_id, (prompt_ids, params, fields) in requests.items():
        driver.add(req_id, prompt_ids, params, **fields)
    with jax.transfer_guard("disallow"):
        while driver.blocks:
            running = sorted(driver.known - driver.preempted)
            if running and rng.random() < 0.2:
                driver.preempt(rng.choice(running))
                num_preemptions += 1
                continue
            waiting = sorted(set(driver.blocks) - set(running))
            candidates = running + waiting[: MAX_NUM_SEQS - len(running)]
            budget, num_scheduled = MAX_NUM_BATCHED_TOKENS, {}
            for req_id in rng.sample(candidates, rng.randint(1, len(candidates))):
                if budget:
                    num_tokens = min(budget, rng.randint(1, driver.num_left(req_id)))
                    num_scheduled[req_id] = num_tokens
                    budget -= num_tokens
            driver.step(num_scheduled)
            for req_id in list(driver.blocks):
                if len(driver.output_of(req_id)) >= NUM_NEW_TOKENS:
                    driver.finish(req_id)
    driver.finish_all()
    assert {req_id: driver.output_of(req_id) for req_id in requests} == expected
    assert num_preemptions > 5
    assert runner.num_compiles_after_ready == 0


@on_both_chunkings
def test_processors_see_tokens_that_only_the_device_knows(warm, runner):
    """A step ahead: the host has not seen the token that the next draw depends on."""
    requests, expected = requests_and_answers(warm.model)
    for names in (["repetition", "bad_words", "plain"], ["all", "presence", "frequency"]):
        driver, handles = RunnerDriver(runner), []
        for name in names:
            prompt_ids, params, fields = requests[name]
            driver.add(name, prompt_ids, params, **fields)
            driver_step = {name: driver.num_left(name)}
            while driver.num_left(name) > MAX_NUM_BATCHED_TOKENS:
                driver.step({name: MAX_NUM_BATCHED_TOKENS})
                driver_step = {name: driver.num_left(name)}
            driver.step(driver_step)
        for step in range(NUM_NEW_TOKENS - 1):
            # The order of requests changes from step to step.
            order = names[step % 3 :] + names[: step % 3]
            handles.append(runner.execute_model(driver.schedule(dict.fromkeys(order, 1))))
            if len(handles) > 1:
                fetch_tokens(driver, handles.pop(0))
        fetch_tokens(driver, handles.pop())
        assert {name: driver.output_of(name) for name in names} == {
            name: expected[name] for name in names
        }
        driver.finish_all()


@on_both_chunkings
def test_drawn_tokens_have_their_seed_and_the_models_own_logprobs(warm, runner):
    """Alone or with another request. Log-probabilities are those before processing."""
    params = SamplingParams(
        temperature=1.5, seed=4, logprobs=20, repetition_penalty=1.7, logit_bias={3: 4.0}
    )
    outputs = []
    for has_neighbour in (False, True):
        driver = RunnerDriver(runner)
        driver.add("a", prompt(5, 6), params)
        if has_neighbour:
            driver.add("b", prompt(6, 2), greedy(presence_penalty=1.0))
        num_scheduled = {"b": 2, "a": 6} if has_neighbour else {"a": 6}
        for _ in range(4):
            output = driver.step(num_scheduled)
            logprobs = output.logprobs[output.req_ids.index("a")][0]
            num_scheduled = dict.fromkeys(num_scheduled, 1)
        logits_np = warm.model.dense_logits(driver.tokens["a"][:-1])[-1]
        true_np = logits_np - np.log(np.exp(logits_np - logits_np.max()).sum()) - logits_np.max()
        assert logprobs.top_token_ids == np.argsort(-true_np)[:20].tolist()
        token_id = driver.output_of("a")[-1]
        np.testing.assert_allclose(logprobs.token_logprob, true_np[token_id], atol=1e-4)
        outputs.append(driver.output_of("a"))
        driver.finish_all()
    assert outputs[0] == outputs[1]


def bitmask(allowed):
    """Args: allowed: Request id -> token ids."""
    bitmask_np = np.zeros((len(allowed), vocab_words(VOCAB)), np.int32)
    for row_np, token_ids in zip(bitmask_np, allowed.values(), strict=True):
        for token_id in token_ids:
            row_np[token_id // 32] |= np.int64(1 << token_id % 32).astype(np.int32)
    return GrammarBitmask(req_ids=list(allowed), bitmask_np=bitmask_np)


@on_both_chunkings
def test_step_with_a_grammar_waits_for_its_bitmask(warm, runner):
    driver = RunnerDriver(runner)
    driver.add("bound", prompt(1, 4), greedy(repetition_penalty=1.3), needs_grammar=True)
    driver.add("free", prompt(2, 3), greedy())
    # Its prompt is not finished, so it draws nothing and waits for nothing.
    driver.step({"bound": 2, "free": 3})
    allowed = [[7, 33, 49], [0, 32], [5]]
    num_scheduled = {"free": 1, "bound": 2}
    for token_ids in allowed:
        handle = runner.execute_model(driver.schedule(num_scheduled))
        assert handle.needs_bitmask
        with pytest.raises(InvariantError, match="start_sampling"):
            handle.sample_tokens()
        with pytest.raises(InvariantError, match="start_sampling"):
            runner.execute_model(driver.schedule({}))
        for wrong in ({}, {"free": token_ids}, {"bound": [1], "free": [1]}):
            with pytest.raises(InvariantError, match="bound"):
                handle.start_sampling(bitmask(wrong))
        handle.start_sampling(bitmask({"bound": token_ids}))
        assert not handle.needs_bitmask
        with pytest.raises(InvariantError, match="needs no grammar bitmask"):
            handle.start_sampling(bitmask({"bound": token_ids}))
        logits_np = warm.model.dense_logits(driver.tokens["bound"])[-1]
        expected_np = true_logits(
            logits_np,
            driver.params["bound"],
            prompt(1, 4),
            driver.output_of("bound"),
            grammar=token_ids,
        )
        fetch_tokens(driver, handle)
        assert driver.output_of("bound")[-1] == expected_np.argmax()
        num_scheduled = {"bound": 1, "free": 1}
    assert driver.output_of("free") == dense_greedy(warm.model, prompt(2, 3), greedy(), 4)
    # A step without a grammar does not wait, also if it has one token per request.
    assert not runner.execute_model(driver.schedule({"free": 1})).needs_bitmask
    driver.finish_all()


def test_arrays_that_stay_on_the_device_are_counted(runner):
    sampler = runner.worker.sampler
    assert isinstance(sampler, StepSampler)
    arrays = (sampler.logits, sampler.row_state, sampler._no_mask)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(arrays))
    assert num_bytes == StepSampler.num_bytes(runner._buckets, VOCAB)
    logits_bytes, history_bytes = MAX_NUM_SEQS * VOCAB * 4, MAX_NUM_SEQS * MAX_MODEL_LEN * 4
    assert num_bytes > logits_bytes + history_bytes
