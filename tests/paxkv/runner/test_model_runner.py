"""The runner's tokens equal a dense computation for any batching."""

import contextlib
import copy
import random
import time

import jax
import jax.monitoring
import numpy as np
import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import BlockCopy
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.memory.memory_plan import HostMemory
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.sampling.logits_check import LogitsCheck
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.shared_runners import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    make_runner,
)
from tests.paxkv.runner.tiny_model import VOCAB, TinyModel

GREEDY = SamplingParams(temperature=0.0)
on_every_runner = pytest.mark.parametrize(
    "warm", ["one_group", "three_groups", "batch_invariant"], indirect=True
)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def dense_greedy(model, prompt_ids, num_tokens):
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(int(model.dense_logits(token_ids)[-1].argmax()))
    return token_ids[len(prompt_ids) :]


@on_every_runner
def test_prefill_and_decode_equal_a_dense_computation(warm):
    """Prompts in chunks and decodes, several windows long; freed blocks are used again."""
    driver = RunnerDriver(warm.runner)
    lengths = {"a": 3, "b": 8, "c": 14}
    for req_id, length in lengths.items():
        driver.add(req_id, prompt(length, length), GREEDY)
    with jax.transfer_guard("disallow"):
        driver.step({"a": 3, "c": 5})
        driver.step({"c": 7, "a": 1})
        driver.step({"b": 4, "c": 2, "a": 1})
        driver.step({"b": 4, "a": 1})
        for _ in range(20):
            driver.step({"b": 1, "c": 1, "a": 1})
    for req_id, length in lengths.items():
        num_tokens = len(driver.output_of(req_id))
        expected = dense_greedy(warm.model, prompt(length, length), num_tokens)
        assert driver.output_of(req_id) == expected
        for group, window in enumerate(driver.windows):
            if window is not None:
                without_windows = copy.copy(warm.model)
                without_windows.windows = (None,) * len(warm.model.windows)
                unlimited = dense_greedy(without_windows, prompt(length, length), num_tokens)
                assert expected != unlimited  # the window is felt
                # The sliding group holds the blocks of the last window, and no more.
                assert sum(block > 0 for block in driver.blocks[req_id][group]) <= 2
    driver.finish_all()


def test_request_in_the_middle_of_its_prompt_returns_no_token(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(0, 6), SamplingParams(logprobs=2))
    driver.add("b", prompt(1, 2), GREEDY)
    output = driver.step({"a": 4, "b": 2})
    assert output.req_ids == ["a", "b"]
    assert [len(t) for t in output.sampled_token_ids] == [0, 1]
    assert output.logprobs == [[], None]
    output = driver.step({"b": 1, "a": 2})
    assert output.req_ids == ["b", "a"]
    assert [len(t) for t in output.sampled_token_ids] == [1, 1]
    assert len(output.logprobs[1][0].top_token_ids) == 2
    driver.finish_all()


@on_every_runner
def test_logprobs_equal_the_dense_ones(warm, runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(5, 7), SamplingParams(temperature=2.0, seed=1, logprobs=20))
    output = driver.step({"a": 7})
    logits_np = warm.model.dense_logits(prompt(5, 7))[-1]
    true_np = logits_np - np.log(np.exp(logits_np - logits_np.max()).sum()) - logits_np.max()
    token_id, logprobs = output.sampled_token_ids[0][0], output.logprobs[0][0]
    np.testing.assert_allclose(logprobs.token_logprob, true_np[token_id], atol=1e-4)
    assert logprobs.token_rank == (true_np > true_np[token_id]).sum() + 1
    assert logprobs.top_token_ids == np.argsort(-true_np)[:20].tolist()
    np.testing.assert_allclose(logprobs.top_logprobs, np.sort(true_np)[::-1][:20], atol=1e-4)
    driver.finish_all()


def random_params(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 5, 20]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.choice([None, 3]),
        logprobs=rng.choice([None, 4]),
    )


def random_schedule(driver, rng, can_start):
    """Some requests in any order, with any number of tokens each that the budget gives."""
    running = [r for r in driver.known if r not in driver.preempted]
    others = [r for r in driver.blocks if r not in running] if can_start else []
    started = rng.sample(sorted(others), min(len(others), MAX_NUM_SEQS - len(running)))
    candidates = sorted(running) + started
    budget, num_scheduled = MAX_NUM_BATCHED_TOKENS, {}
    for req_id in rng.sample(candidates, rng.randint(1, len(candidates))):
        if budget:
            num_scheduled[req_id] = min(budget, rng.randint(1, driver.num_left(req_id)))
            budget -= num_scheduled[req_id]
    return num_scheduled


@contextlib.contextmanager
def recorded_compilations():
    """A list of the events of whatever JAX compiles inside, in any thread."""
    events = []

    def listen(event, *_, **__):
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@on_every_runner
def test_random_traffic_gives_each_request_the_tokens_it_gets_alone(runner):
    """Chunks, order, neighbours, preemption and reused blocks change nothing; nothing compiles."""
    rng = random.Random(7)
    requests = {
        f"req-{i}": (prompt(100 + i, rng.randint(1, 20)), random_params(rng), rng.randint(1, 12))
        for i in range(14)
    }
    alone = {}
    for req_id, (prompt_ids, params, num_tokens) in requests.items():
        driver = RunnerDriver(runner, seed=1)
        driver.add(req_id, prompt_ids, params)
        alone[req_id] = driver.run_alone(req_id, num_tokens, MAX_NUM_BATCHED_TOKENS)
        driver.finish_all()

    driver, num_preemptions = RunnerDriver(runner, seed=2), 0
    for req_id, (prompt_ids, params, _) in requests.items():
        driver.add(req_id, prompt_ids, params)
    with recorded_compilations() as compilations:
        with jax.transfer_guard("disallow"):
            while driver.blocks:
                running = sorted(driver.known - driver.preempted)
                can_start = not running or rng.random() < 0.5
                if running and rng.random() < 0.2:
                    driver.preempt(rng.choice(running))
                    num_preemptions += 1
                    continue
                driver.step(random_schedule(driver, rng, can_start))
                for req_id in list(driver.blocks):
                    if len(driver.output_of(req_id)) >= requests[req_id][2]:
                        driver.finish(req_id)
        driver.finish_all()
    assert {r: driver.output_of(r) for r in requests} == alone
    assert num_preemptions > 5
    assert compilations == []
    assert runner.num_compiles_after_ready == 0


def test_next_step_may_start_before_the_tokens_are_fetched(runner):
    """Tokens fed from the device give what tokens fed from the host give."""
    params = {"a": GREEDY, "b": SamplingParams(temperature=1.3, seed=4)}
    expected = {}
    for req_id, length in (("a", 4), ("b", 2)):
        driver = RunnerDriver(runner)
        driver.add(req_id, prompt(length, length), params[req_id])
        expected[req_id] = driver.run_alone(req_id, 6, MAX_NUM_BATCHED_TOKENS)
        driver.finish_all()

    driver = RunnerDriver(runner)
    driver.add("a", prompt(4, 4), params["a"])
    driver.add("b", prompt(2, 2), params["b"])
    handles = []
    with jax.transfer_guard("disallow"):
        # b's prompt takes two steps; the order of requests changes from step to step.
        for num_scheduled in ({"b": 1, "a": 4}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"b": 1}):
            handles.append(runner.execute_model(driver.schedule(num_scheduled)))
            if len(handles) > 1:
                collect(driver, handles[-2])
    collect(driver, handles[-1])
    assert driver.output_of("a") == expected["a"][:3]
    assert driver.output_of("b") == expected["b"][:3]
    driver.finish_all()


def test_late_token_does_not_reach_a_new_request_of_the_same_id(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(5, 5), GREEDY)
    alone = list(driver.run_alone("a", 3, MAX_NUM_BATCHED_TOKENS))
    driver.finish_all()

    driver.add("a", prompt(4, 4), GREEDY)
    late = runner.execute_model(driver.schedule({"a": 4}))
    driver.finish("a")
    driver.add("a", prompt(5, 5), GREEDY)
    handle = runner.execute_model(driver.schedule({"a": 3}))
    late.sample_tokens()
    collect(driver, handle)
    assert driver.run_alone("a", 3, MAX_NUM_BATCHED_TOKENS) == alone
    driver.finish_all()


def collect(driver, handle):
    output = handle.sample_tokens()
    for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
        driver.tokens[req_id] += token_ids


def test_requests_without_a_seed_draw_by_their_id_and_repeat(runner):
    outputs = []
    for req_id in ("a", "a", "b"):
        driver = RunnerDriver(runner)
        driver.add(req_id, prompt(0, 1), SamplingParams(temperature=3.0))
        outputs.append(driver.run_alone(req_id, 8, MAX_NUM_BATCHED_TOKENS))
        driver.finish_all()
    assert outputs[0] == outputs[1] != outputs[2]


def test_step_that_only_ends_requests_computes_nothing(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(0, 3), GREEDY)
    driver.step({"a": 3})
    num_padded_tokens = runner.num_padded_tokens
    driver.finish("a")
    output = driver.step({})
    assert output.req_ids == [] and output.sampled_token_ids == []
    assert runner.num_padded_tokens == num_padded_tokens
    with pytest.raises(InvariantError, match="unknown"):
        driver.known.add("a")
        driver.blocks["a"] = [[1]]
        driver.step({"a": 1})


@pytest.mark.parametrize("is_asked", [True, False])
def test_requests_with_nan_logits_are_counted_with_check_logits(runner, monkeypatch, is_asked):
    """The check needs no programs of its own."""
    monkeypatch.setattr(runner, "_logits_check", LogitsCheck() if is_asked else None)
    driver = RunnerDriver(runner)
    driver.add("a", prompt(0, 5), GREEDY)
    driver.step({"a": 5})
    driver.step({"a": 1})
    assert runner.num_corrupted_requests == 0
    # The head alone: keys and values stay numbers, and other tests use the same cache.
    *others, head = runner.worker.params[:3]
    broken = (*others, head * np.float32(np.nan), *runner.worker.params[3:])
    monkeypatch.setattr(runner.worker, "params", broken)
    for _ in range(3):
        driver.step({"a": 1})
    driver.add("b", prompt(1, 4), GREEDY)
    driver.step({"a": 1, "b": 4})
    assert runner.num_corrupted_requests == (2 if is_asked else 0)
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


def test_padding_is_counted(runner):
    driver = RunnerDriver(runner)
    before = runner.num_padded_tokens
    driver.add("a", prompt(0, 5), GREEDY)
    driver.step({"a": 5})  # padded to 14
    driver.step({"a": 1})  # padded to 3
    assert runner.num_padded_tokens - before == 11
    driver.finish_all()


def test_a_new_runner_has_padded_no_tokens():
    assert make_runner(TinyModel()).num_padded_tokens == 0


def test_tokens_are_fetched_once(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(0, 1), GREEDY)
    handle = runner.execute_model(driver.schedule({"a": 1}))
    handle.sample_tokens()
    with pytest.raises(InvariantError, match="fetched before"):
        handle.sample_tokens()
    driver.finish_all()


def test_is_done_is_true_once_the_tokens_are_computed(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(0, 1), GREEDY)
    handle = runner.execute_model(driver.schedule({"a": 1}))
    end_s = time.monotonic() + 60.0
    while not handle.is_done:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    handle.sample_tokens()
    driver.finish_all()
    assert runner.execute_model(driver.schedule({})).is_done


@pytest.mark.slow  # Compiles three more programs; `three_groups` has a window that is felt.
def test_two_groups_with_a_window_longer_than_requests_equal_one_group(runner):
    wide = make_runner(TinyModel(windows=(10 * MAX_MODEL_LEN, None)))
    outputs = []
    for each in (runner, wide):
        driver = RunnerDriver(each)
        driver.add("a", prompt(5, 12), SamplingParams(temperature=0.0, logprobs=20))
        driver.step({"a": 8})
        outputs.append([driver.step({"a": n}).logprobs[0][0] for n in (4, 1, 1)])
        driver.finish_all()
    for one_group, two_groups in zip(*outputs, strict=True):
        assert one_group.top_token_ids == two_groups.top_token_ids
        np.testing.assert_allclose(one_group.top_logprobs, two_groups.top_logprobs, atol=1e-5)


@on_every_runner
def test_copies_come_before_the_steps_writes(warm, runner):
    """Both requests write in the step of the copy, and get the tokens that each gets alone."""
    driver = RunnerDriver(runner)
    driver.add("a", prompt(9, 11), GREEDY)
    driver.step({"a": 8})
    driver.step({"a": 3})
    copies = driver.fork("a", "b")
    driver.tokens["b"][-1] = (driver.tokens["a"][-1] + 1) % VOCAB  # they differ from here on
    scheduler_output = driver.schedule({"a": 1, "b": 1})
    scheduler_output.block_copies.extend(copies)
    with jax.transfer_guard("disallow"):
        collect(driver, runner.execute_model(scheduler_output))
    for _ in range(6):
        driver.step({"a": 1, "b": 1})
    for req_id in ("a", "b"):
        assert driver.tokens[req_id][12:] == dense_greedy(warm.model, driver.tokens[req_id][:12], 7)
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


def test_step_without_tokens_still_copies(runner):
    driver = RunnerDriver(runner)
    driver.add("a", prompt(9, 5), GREEDY)
    driver.step({"a": 5})
    source = driver.blocks["a"][0][0]
    scheduler_output = driver.schedule({})
    target = driver.free_blocks[-1]
    scheduler_output.block_copies.append(BlockCopy(source_block_id=source, target_block_id=target))
    assert runner.execute_model(scheduler_output).sample_tokens().req_ids == []
    pages_np = read_pages(runner)
    keys_np, values_np = np.split(pages_np[:, source], 2, axis=-1)
    assert keys_np.any() and values_np.any()
    np.testing.assert_array_equal(pages_np[:, target], pages_np[:, source])
    driver.finish_all()


def read_pages(runner: ModelRunner) -> np.ndarray:  # [num_rows, num_blocks, num_words]
    return np.asarray(jax.device_get(runner.worker.kv_cache))


@on_every_runner
def test_no_step_writes_to_the_null_block(runner):
    driver = RunnerDriver(runner)
    for i in range(6):
        driver.add(f"req-{i}", prompt(i, 20), SamplingParams(temperature=1.0))
        driver.run_alone(f"req-{i}", 10, MAX_NUM_BATCHED_TOKENS)
        driver.finish(f"req-{i}")
    pages_np = read_pages(runner)
    assert pages_np[:, 1:].any(axis=(0, 2)).sum() > 10  # many blocks hold something
    assert not pages_np[:, 0].any()
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


def test_unsupported_step_is_rejected_before_anything_changes(runner):
    driver = RunnerDriver(runner)
    scheduler_output = driver.schedule({})
    scheduler_output.scheduled_spec_decode_tokens["a"] = [1]
    with pytest.raises(InvariantError, match="more than 0 drafts"):
        runner.execute_model(scheduler_output)


def test_pool_too_small_is_a_config_error():
    with pytest.raises(ConfigError, match="too small for one request"):
        make_runner(TinyModel(), CacheConfig(block_size=8, cpu_kv_cache_bytes=100))


def test_cache_without_a_given_size_shares_the_memory_that_is_free():
    config = CacheConfig(block_size=8)
    pool_bytes = 2**20
    runner = make_runner(TinyModel(), config, host_memory=HostMemory(free_bytes=2 * pool_bytes + 1))
    assert runner.memory_plan.pool_bytes == pool_bytes
    assert runner.worker.kv_cache.nbytes == pool_bytes
    with pytest.raises(ConfigError, match="are free after the weights"):
        make_runner(TinyModel(), config, host_memory=HostMemory(free_bytes=0))


def test_half_precision_model_keeps_its_cache_in_float32_on_the_cpu():
    runner = make_runner(TinyModel(dtype="bfloat16"))
    assert runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype == "float32"
    assert runner.worker.kv_cache.dtype == np.float32


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16"])
def test_half_precision_that_is_asked_for_is_kept_as_integers_on_the_cpu(kv_cache_dtype):
    config = CacheConfig(block_size=8, num_gpu_blocks_override=30, kv_cache_dtype=kv_cache_dtype)
    model = TinyModel()
    runner = make_runner(model, config)
    assert runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype == kv_cache_dtype
    # The place of each layer names the format of the bits.
    assert {place.format.dtype for ((_, place),) in model.places} == {kv_cache_dtype}
    assert runner.worker.kv_cache.dtype == np.uint16
