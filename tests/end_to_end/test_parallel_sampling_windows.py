"""Forks share the blocks of sliding layers too, as far as those are still held."""

import random

import pytest

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.request_output import BeamSearchOutput
from paxkv.runner.model_runner import ModelRunner
from tests.end_to_end.checked_engine import (
    VOCAB_SIZE,
    CheckedCore,
    EngineSettings,
    completions_alone,
    make_llm,
)

# The longest sequence is over four windows long; windows and blocks begin at different places.
MAX_TOKENS = 12
PROMPTS = [
    [random.Random(i).randrange(VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate((5, 13, 24, 37))
]


@pytest.fixture(scope="module")
def runner(windows_runner: ModelRunner) -> ModelRunner:
    assert len(windows_runner.kv_cache_config.kv_cache_groups) == 2
    return windows_runner


@pytest.fixture(scope="module")
def params() -> SamplingParams:
    return SamplingParams(n=3, seed=5, temperature=0.8, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def alone(runner, params: SamplingParams) -> list[list[list[int]]]:
    return [completions_alone(runner, prompt, params) for prompt in PROMPTS]


# Each value of a setting comes with each value of every other one.
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "num_blocks", "enable_prefix_caching"),
    [(8, 160, False), (8, 18, True), (5, 160, True), (5, 18, False)],
)
def test_completions_equal_separate_requests(
    runner,
    params: SamplingParams,
    alone: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    enable_prefix_caching: bool,
    num_blocks: int,
    max_num_batched_tokens: int,
) -> None:
    settings = EngineSettings(
        enable_prefix_caching=enable_prefix_caching,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    core = CheckedCore(runner, settings)
    llm = make_llm(monkeypatch, core)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in outputs] == alone
    llm.close()
    assert core.num_held_blocks == 0
    assert core.observed.num_block_copies > 0
    assert (core.num_preemptions > 0) == (num_blocks == 18)


def search(runner, settings: EngineSettings) -> list[BeamSearchOutput]:
    core = CheckedCore(runner, settings)
    with pytest.MonkeyPatch.context() as patch:
        llm = make_llm(patch, core)
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=9))
        llm.close()
    assert core.num_held_blocks == 0
    assert (core.observed.num_block_copies > 0) == settings.is_sharing
    return outputs


@pytest.fixture(scope="module")
def beams_apart(runner) -> list[BeamSearchOutput]:
    return search(runner, EngineSettings(is_sharing=False))


@pytest.mark.parametrize(
    ("enable_prefix_caching", "num_blocks"),
    [
        (False, 160),
        (True, 30),
        pytest.param(True, 160, marks=pytest.mark.slow),
        pytest.param(False, 30, marks=pytest.mark.slow),
    ],
)
def test_beams_equal_requests_that_share_nothing(
    runner, beams_apart: list[BeamSearchOutput], enable_prefix_caching: bool, num_blocks: int
) -> None:
    settings = EngineSettings(enable_prefix_caching=enable_prefix_caching, num_blocks=num_blocks)
    for one, other in zip(search(runner, settings), beams_apart, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        # Keys and values in float16 may be rounded the other way in another batch.
        assert [s.cum_logprob for s in one.sequences] == pytest.approx(
            [s.cum_logprob for s in other.sequences], abs=1e-3
        )
