"""The device reads the sampling settings that the host has written."""

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.sampling.sampling_columns import (
    SamplingInputs,
    encode_sampling_params,
    seed_of_request,
)


def round_trip(params, seed=0):
    row_np = encode_sampling_params(params, seed=seed, vocab_size=100)
    return SamplingInputs(rows=row_np[None], draw_position=np.array([17], np.int32))


def test_settings_round_trip():
    inputs = round_trip(SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, top_k=40))
    assert inputs.temperature[0] == np.float32(0.7)
    assert inputs.top_p[0] == np.float32(0.9)
    assert inputs.min_p[0] == np.float32(0.05)
    assert inputs.top_k[0] == 40
    assert inputs.draw_position[0] == 17
    assert not inputs.wants_logprobs[0]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234567_89ABCDEF])
def test_all_64_bits_of_a_seed_arrive(seed):
    high, low = (int(words[0]) for words in round_trip(SamplingParams(), seed).seed)
    assert (high << 32) + low == seed % 2**64


def test_greedy_request_carries_no_filters():
    inputs = round_trip(SamplingParams(temperature=1e-6, top_p=0.5, min_p=0.5, top_k=3))
    assert (inputs.temperature[0], inputs.top_p[0], inputs.min_p[0]) == (0, 1, 0)
    assert inputs.top_k[0] == 0


@pytest.mark.parametrize("top_k", [-1, 0, 100, 2**31 - 1])
def test_top_k_that_keeps_all_is_zero(top_k):
    assert round_trip(SamplingParams(top_k=top_k)).top_k[0] == 0


@pytest.mark.parametrize("logprobs", [0, 5])
def test_logprobs_of_0_requests_log_probabilities(logprobs):
    assert round_trip(SamplingParams(logprobs=logprobs)).wants_logprobs[0]


def test_derived_seed_repeats_and_differs_between_requests():
    # The number is fixed: outputs of requests without a seed must not change between versions.
    assert seed_of_request(0, "req-0") == seed_of_request(0, "req-0")
    seeds = {seed_of_request(s, f"req-{r}") for s in range(10) for r in range(10)}
    assert len(seeds) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
