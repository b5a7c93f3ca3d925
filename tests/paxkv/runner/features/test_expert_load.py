"""The load of experts is counted in every program, and read without waiting for the device."""

import dataclasses
import logging
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import ConfigError
from paxkv.runner import model_runner
from paxkv.runner.features.expert_load import ExpertLoad, describe_load
from paxkv.runner.shapes import step_buckets
from tests.oracles.token_experts import (
    DENSE_LAYERS,
    NUM_EXPERTS,
    NUM_LAYERS,
    count_choices,
    make_token_experts,
)
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.greedy_draws import greedy_draws
from tests.paxkv.runner.shared_runners import make_runner, make_warm_runner

GREEDY = SamplingParams(temperature=0.0)
WINDOW_S = 10.0
SPARSE_LAYERS = [i for i in range(NUM_LAYERS) if i not in DENSE_LAYERS]
COUNTS = re.compile(rf"tensor<{NUM_LAYERS}x{NUM_EXPERTS}xi32>")


class FakeClock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_token_experts(tmp_path_factory.mktemp("moe"))


@pytest.fixture(
    params=[
        pytest.param(False, id="plain"),
        pytest.param(True, id="batch_invariant", marks=pytest.mark.slow),
    ]
)
def counting(request, model, monkeypatch):
    """A warm runner that counts, and the clock of its windows."""
    # So that batch-invariant steps have several tiles.
    monkeypatch.setattr(step_buckets, "INVARIANT_TILE_TOKENS", 4)
    clock = FakeClock()
    load = ExpertLoad(model, WINDOW_S, clock=clock)
    monkeypatch.setattr(model_runner, "make_features", lambda *args: (load,))
    config = RunnerConfig(batch_invariant=request.param)
    # A burst of one request has rows of padding, whose experts must not count.
    runner = make_warm_runner(model, config, has_few_sizes=True, draws_greedily=True).runner
    return SimpleNamespace(runner=runner, clock=clock, drops_rows=not request.param)


def test_counts_cover_the_tokens_that_steps_and_bursts_computed(counting, model):
    runner = counting.runner
    driver = RunnerDriver(runner)
    prompts = {"a": [5, 9, 2, 7, 11, 3, 8], "b": [4, 6, 50, 2, 51, 2, 2, 2, 7]}
    for req_id, prompt in prompts.items():
        driver.add(req_id, prompt, GREEDY)
    expected_np = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64)

    def step(num_scheduled):
        tokens = {
            req_id: driver.tokens[req_id][driver.num_computed[req_id] :][:num_tokens]
            for req_id, num_tokens in num_scheduled.items()
        }
        driver.step(num_scheduled)
        # The last layer of a step with a prompt computes the last token of each request.
        drops_rows = counting.drops_rows and max(num_scheduled.values()) > 1
        for layer_idx in range(NUM_LAYERS):
            first = -1 if drops_rows and layer_idx == NUM_LAYERS - 1 else 0
            computed = [token_id for own in tokens.values() for token_id in own[first:]]
            expected_np[layer_idx] += count_choices(model, computed, layer_idx)

    def check(*, only_new):
        found = runner.feature_stats(only_new=only_new)["expert_tokens"]
        assert found == {layer: tuple(expected_np[layer].tolist()) for layer in SPARSE_LAYERS}

    with jax.transfer_guard("disallow"):
        check(only_new=False)
        step({"a": 3})
        step({"a": 4, "b": 9})
        for _ in range(3):
            step({"a": 1, "b": 1})
        # Nothing is read before the window has passed.
        assert runner.feature_stats(only_new=True) == {}
        counting.clock.now_s += WINDOW_S
        check(only_new=True)
        assert runner.feature_stats(only_new=True) == {}
        check(only_new=False)
        # The next window begins with its first step, which ends no window.
        counting.clock.now_s += 5 * WINDOW_S
        step({"b": 1})
        assert runner.feature_stats(only_new=True) == {}
        counting.clock.now_s += WINDOW_S
        check(only_new=True)
    assert runner.num_compiles_after_ready == 0
    driver.finish_all()


def test_flag_adds_no_program_and_programs_without_it_count_nothing(model):
    lowered = {}
    for window_s in (None, WINDOW_S):
        runner = make_runner(model, runner_config=RunnerConfig(expert_load_window=window_s))
        programs, kv_cache = runner.worker.programs, runner.worker.kv_cache
        buckets = programs.buckets
        wanted = [buckets.burst_shape_for(2)]
        if window_s is None:
            wanted.append(buckets.shape_for(9))
            shapes = buckets.largest_first
        with greedy_draws():
            lowered[window_s] = [programs._lower(shape, kv_cache).as_text() for shape in wanted]
    assert [
        dataclasses.replace(shape, features=shape.features[:-1])
        if hasattr(shape, "features")
        else shape
        for shape in buckets.largest_first
    ] == list(shapes)
    assert not any(COUNTS.search(text) for text in lowered[None])
    assert all(COUNTS.search(text) for text in lowered[WINDOW_S])


def test_model_without_experts_is_refused():
    model = SimpleNamespace(parameters={}, weight_rules={}, stack_places={})
    with pytest.raises(ConfigError, match=r"no layer .* has experts. Leave --expert-load-window"):
        ExpertLoad(model, 5.0)


class FakeArray:
    """Counts that the device has not computed yet."""

    shape, dtype = (NUM_LAYERS, NUM_EXPERTS), np.dtype(np.int32)

    def __init__(self, sharding):
        self.sharding = sharding
        self.is_done = False

    def is_ready(self):
        return self.is_done

    def __array__(self, *args, **kwargs):
        assert self.is_done, "a step waits for the device"
        return np.full(self.shape, 3, np.int32)


def test_window_is_read_once_the_device_is_done(model, caplog):
    clock = FakeClock()
    load = ExpertLoad(model, WINDOW_S, clock=clock)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    load.allocate(sharding)
    nothing, one_token = (SimpleNamespace(num_scheduled_tokens=n) for n in ({}, {"a": 1}))
    load.before_step(nothing, None)
    clock.now_s += 2 * WINDOW_S
    # Steps that compute nothing are no window.
    load.before_step(one_token, None)
    load.arrays["expert_counts"] = counted = FakeArray(sharding)
    clock.now_s += WINDOW_S
    load.before_step(one_token, None)
    assert load.arrays["expert_counts"] is not counted
    assert load.stats(only_new=True) == {}
    counted.is_done = True
    with caplog.at_level(logging.INFO):
        load.before_step(one_token, None)
    assert "expert load in 10.0 s: 72 choices" in caplog.text
    (counts,) = set(load.stats(only_new=True)["expert_tokens"].values())
    assert counts == (3,) * NUM_EXPERTS


def test_log_shows_how_uneven_layers_are():
    # Layers 1 and 4 have less than half of the choices of layer 2.
    counts = {1: [4, 0, 2, 2], 2: [5, 5, 5, 5], 3: [0, 0, 9, 3], 4: [0] * 4}
    assert describe_load({idx: np.array(own) for idx, own in counts.items()}) == (
        "40 choices, imbalance 2.00 in the median layer and 3.00 in layer 3, 2 of 8 experts idle"
    )
    assert describe_load({0: np.zeros(4, int)}) == "0 choices"
