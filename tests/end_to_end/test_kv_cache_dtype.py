"""Keys and values kept in 16 bits: answers near the model's own, the same in every mode."""

import random

import numpy as np
import pytest

from models import load_model
from paxkv.config.sampling_params import SamplingParams
from tests.end_to_end.checked_engine import (
    VOCAB_SIZE,
    CheckedCore,
    EngineSettings,
    make_llm,
    make_runner,
)
from tests.oracles.paged_stepper import PagedStepper
from tests.small_engine import CHECKPOINT

# Difference over the norm of the logits: the largest, as in docs/guide/tuning.md, and what none has
# whose bits are read as those of another type.
ERRORS = {"float16": (1e-6, 0.001), "bfloat16": (0.001, 0.01)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# Two blocks that all begin with, then tokens of their own.
PROMPTS = [
    [random.Random(0).randrange(VOCAB_SIZE) for _ in range(16)]
    + [random.Random(i).randrange(VOCAB_SIZE) for _ in range(length)]
    # As many as look for a prefix that they share.
    for i, length in enumerate((3, 9, 14, 27, 5, 2, 8, 11), 1)
]


@pytest.fixture(scope="module")
def runner(windows_runner):
    groups = windows_runner.kv_cache_config.kv_cache_groups
    assert [group.kv_cache_spec.dtype for group in groups] == ["float16", "float16"]
    return windows_runner


def answers(runner, settings: EngineSettings) -> tuple[list[list[int]], CheckedCore]:
    """Tokens of each prompt, all at once, and the engine that made them."""
    core = CheckedCore(runner, settings)
    with pytest.MonkeyPatch.context() as patch:
        llm = make_llm(patch, core)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        # The second time their prompts are found.
        outputs += llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.close()
    return [output.outputs[0].token_ids for output in outputs], core


@pytest.fixture(scope="module")
def plain(runner) -> list[list[int]]:
    """Without prefix cache, chunks, preemption or overlap."""
    tokens, core = answers(runner, EngineSettings())
    assert (core.num_preemptions, core.observed.num_computed_tokens) == (0, num_tokens(tokens))
    return tokens


# In the normal run, `test_an_engine_keeps_bfloat16_too` compares log-probabilities of both dtypes.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_as_near_as_stated(dtype):
    model = load_model(CHECKPOINT)
    prompts = np.random.default_rng(0).integers(3, model.config.vocab_size, (3, 15))
    chunks = [{row: prompt.tolist() for row, prompt in enumerate(prompts)}, {0: [5]}]
    steppers = PagedStepper(model), PagedStepper(model, cache_dtype=dtype)
    least_error, worst_error = ERRORS[dtype]
    for chunk in chunks:
        truth, got = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            error = np.linalg.norm(got[row] - truth[row]) / np.linalg.norm(truth[row])
            assert least_error < error < worst_error


@pytest.mark.parametrize(
    "settings",
    [
        EngineSettings(enable_prefix_caching=True),
        EngineSettings(max_num_batched_tokens=5),
        EngineSettings(num_blocks=20),
        EngineSettings(is_ahead=True),
        EngineSettings(enable_prefix_caching=True, num_blocks=20, is_ahead=True),
    ],
    ids=["prefix_cache", "chunks", "preemption", "ahead", "all"],
)
def test_answers_are_the_same_in_every_mode(runner, plain, settings):
    got, core = answers(runner, settings)
    assert got == plain
    assert (core.num_preemptions > 0) == (settings.num_blocks <= 20)
    if settings.enable_prefix_caching:
        assert core.observed.num_computed_tokens < num_tokens(plain)


def test_an_engine_keeps_bfloat16_too(runner, windows_checkpoint):
    """Prompts in chunks, so that later ones read what earlier ones wrote."""
    other = make_runner(windows_checkpoint, kv_cache_dtype="bfloat16")
    groups = other.kv_cache_config.kv_cache_groups
    assert [group.kv_cache_spec.dtype for group in groups] == ["bfloat16", "bfloat16"]
    logprobs = [first_logprobs(each) for each in (runner, other)]
    differences = [
        got[token_id] - wanted[token_id]
        for wanted, got in zip(*logprobs, strict=True)
        for token_id in wanted.keys() & got.keys()
    ]
    # Each prompt has at least two tokens that both engines found likely.
    assert len(differences) >= 2 * len(PROMPTS)
    assert 0.001 < np.abs(differences).max() < 0.05


def first_logprobs(runner) -> list[dict[int, float]]:
    """The likeliest tokens after each prompt."""
    core = CheckedCore(runner, EngineSettings())
    with pytest.MonkeyPatch.context() as patch:
        llm = make_llm(patch, core)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.close()
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return [{token_id: entry.logprob for token_id, entry in each.items()} for each in found]


def num_tokens(completions: list[list[int]]) -> int:
    """What is computed without a prefix cache: the last token of each is not."""
    return 2 * sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens in completions)
