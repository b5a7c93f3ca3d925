"""The loop with n-gram drafts generates the tokens of the loop without drafts, in fewer steps."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner.drafters.ngram import NgramDrafter
from paxkv.runner.programs.loop_drafters.ngram import find_ngram_drafts
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.program_shapes import NgramShape
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.paxkv.runner.greedy_draws import greedy_draws

NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
)
SHAPE = GenerateShape(batch_size=6, max_prompt_len=9, max_new_tokens=20, block_size=4)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_those_of_the_drafter_on_the_host(seed):
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    limits = {"shortest": shortest, "longest": shortest + rng.randint(0, 2)}
    num_words = rng.choice((2, 4, 10))
    rows = [rng.choices(range(1, 1 + num_words), k=rng.randint(1, 24)) for _ in range(40)]
    # Padding that would be a match.
    padded = [row + rng.choices(range(1, 1 + num_words), k=24 - len(row)) for row in rows]
    found = find_ngram_drafts(
        jnp.array(padded), jnp.array([*map(len, rows)]), NgramShape(num_drafts=4, **limits)
    )
    for row, drafts in zip(rows, found.tolist(), strict=True):
        wanted = NgramDrafter(**limits).start(row).propose(4)
        assert drafts == wanted + [NO_TOKEN] * (4 - len(wanted))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return load_model(write_random_checkpoint(folder, num_layers=1, tie=True), dtype="float32")


@pytest.fixture(scope="module")
def generators(model):
    return [CompiledGenerator(model, SHAPE, speculative_config=c) for c in (None, NGRAM)]


SAMPLED = {"temperature": 1.0, "max_tokens": 20}
# All with logits that are processed, so that only one program is compiled.
SETTINGS = [
    {"temperature": 0.0, "max_tokens": 20, "allowed_token_ids": [7, 8]},
    SAMPLED | {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    SAMPLED | {"seed": 2, "allowed_token_ids": [4, 5, 6], "frequency_penalty": 0.9},
    SAMPLED
    | {"seed": 3, "logit_bias": {27: 3.0, 39: -2.0}, "stop_token_ids": [20, 21, 22]}
    | {"allowed_token_ids": [*range(20, 40)]},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": 17, "top_k": 5, "allowed_token_ids": [9, 10]},
]


# `test_burst_drafts.py` compares the loop's tokens in the normal run.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_without_drafts(generators, seed):
    rng = random.Random(seed)
    params = [SamplingParams(**settings) for settings in rng.sample(SETTINGS, rng.randint(2, 6))]
    # One row has a prompt of the greatest length.
    lengths = [9, *(rng.randint(1, 9) for _ in params[1:])]
    prompts = [rng.choices(range(4, 12), k=length) for length in lengths]
    plain, drafting = (g.generate(prompts, params) for g in generators)
    assert drafting == plain
    assert any(len(token_ids) > 1 for token_ids in plain)


def test_repeated_tokens_need_fewer_steps(model):
    # The layer adds nothing, and the head is the embedding: the likeliest token is the last one.
    params = tuple(
        jax.device_put(np.zeros_like(param)) if "o_proj" in name or "down_proj" in name else param
        for name, param in zip(model.param_names, model.params, strict=True)
    )
    repeating = dataclasses.replace(model, params=params)
    generator = CompiledGenerator(repeating, SHAPE, speculative_config=NGRAM)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    inputs = generator._make_inputs(generator._process([[7, 7, 7]], [params], ()))
    with greedy_draws():
        outputs = generator._generate(repeating.params, inputs)
    assert outputs.token_ids[0].tolist() == [7] * 20
    # The step of the prompt draws a token. The others draw up to 4, if there are 3 drafts.
    # Without drafts there would be 19.
    assert int(outputs.num_steps) <= 7
