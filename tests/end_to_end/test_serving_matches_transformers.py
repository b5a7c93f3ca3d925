"""The engine's logits and greedy tokens are transformers', whatever the serving settings are."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tests.end_to_end.engine_harness import (
    EngineSettings,
    RecordingRunner,
    RunResult,
    greedy,
    run_engine,
)
from tests.end_to_end.settings_product import (
    FACTORS,
    full_product,
    pairs_of,
    pairwise_selection,
    settings_of,
)
from tests.oracles.serving_golden import (
    NUM_NEW_TOKENS,
    SHARED_PREFIXES,
    ServingGolden,
    load_serving_golden,
    write_serving_recipe,
)

GREEDY = greedy(len(SHARED_PREFIXES), NUM_NEW_TOKENS)
Runners = Callable[[str, int], RecordingRunner]
# Largest difference of a logit, as a share of the largest logit.
LOGIT_BOUND = 1e-4


@pytest.fixture(scope="module")
def runners(tmp_path_factory) -> Callable[[str, int], RecordingRunner]:
    """One runner for each recipe and block size, made on first use."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def runner(recipe: str, block_size: int) -> RecordingRunner:
        checkpoint = write_serving_recipe(folder / f"{recipe}_{block_size}", recipe)
        return RecordingRunner(checkpoint, block_size)

    return runner


def check_against(golden: list[ServingGolden], result: RunResult) -> float:
    """Compares a run with its golden one; returns the largest relative difference of a logit."""
    assert result.token_ids == [g.new_tokens for g in golden]
    largest = max(np.abs(g.logits).max() for g in golden)
    worst = 0.0
    for g, rows in zip(golden, result.logits, strict=True):
        # A preempted request computes its prompt again and draws no token twice.
        assert len(rows) == NUM_NEW_TOKENS
        worst = max(worst, float(np.abs(np.stack(rows) - g.logits).max() / largest))
    assert worst < LOGIT_BOUND
    return worst


def run_combination(runners: Runners, combination: tuple) -> int:
    """Checks one combination; returns how often a request was preempted."""
    recipe, settings = settings_of(combination)
    golden = load_serving_golden(recipe)
    prompts = [g.prompt for g in golden]
    runner = runners(recipe, settings.block_size)
    result = run_engine(runner, prompts, settings, sampling_params=GREEDY)
    worst = check_against(golden, result)
    hits = sum(result.num_cached_tokens)
    print(f"{combination}: {worst:.1e}, {result.num_preemptions} preemptions, {hits} tokens hit")
    if not settings.enable_prefix_caching:
        assert hits == 0
    return result.num_preemptions


@pytest.mark.parametrize("combination", pairwise_selection(), ids=str)
def test_answer_does_not_depend_on_settings(runners, combination: tuple) -> None:
    num_preemptions = run_combination(runners, combination)
    has_tiny_pool = combination[list(FACTORS).index("has_tiny_pool")]
    assert (num_preemptions > 0) == has_tiny_pool


@pytest.mark.slow
@pytest.mark.parametrize("combination", full_product(), ids=str)
def test_answer_does_not_depend_on_settings_full_product(runners, combination: tuple) -> None:
    run_combination(runners, combination)


def test_selection_holds_every_pair_of_settings() -> None:
    chosen = set().union(*(pairs_of(c) for c in pairwise_selection()))
    assert chosen == set().union(*(pairs_of(c) for c in full_product()))
    assert len(pairwise_selection()) < len(full_product()) / 8
    assert set(FACTORS["block_size"]) == {8, 16, 32, 64}


@pytest.mark.parametrize(("enable_prefix_caching", "min_preemptions"), [(False, 5), (True, 2)])
def test_tiny_pool_preempts_several_times_and_answers_the_same(
    runners, enable_prefix_caching: bool, min_preemptions: int
) -> None:
    golden = load_serving_golden("llama")
    settings = EngineSettings(
        block_size=8, num_blocks=18, enable_prefix_caching=enable_prefix_caching
    )
    prompts = [g.prompt for g in golden]
    result = run_engine(runners("llama", 8), prompts, settings, sampling_params=GREEDY)
    check_against(golden, result)
    assert result.num_preemptions >= min_preemptions


def test_second_prompt_with_the_same_prefix_hits_it(runners) -> None:
    golden = load_serving_golden("qwen3")
    settings = EngineSettings(block_size=16, num_blocks=64, arrival_gap=3)
    prompts = [g.prompt for g in golden]
    result = run_engine(runners("qwen3", 16), prompts, settings, sampling_params=GREEDY)
    check_against(golden, result)
    # 80 shared tokens are five full blocks of 16, and 33 are two.
    assert result.num_cached_tokens == [0, 80, 0, 32, 0, 0]


def test_live_transformers_agree(tmp_path) -> None:
    """With torch at hand: a checkpoint and prompts that no golden file has seen."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles.make_golden import load_hf_model
    from tests.oracles.make_serving_golden import make_sequences

    checkpoint = write_serving_recipe(tmp_path / "live", "qwen3", seed=99)
    golden = make_sequences(load_hf_model(checkpoint), seed=99)
    settings = EngineSettings(block_size=8, num_blocks=20, max_num_batched_tokens=24)
    result = run_engine(
        RecordingRunner(checkpoint, 8),
        [g.prompt for g in golden],
        settings,
        sampling_params=GREEDY,
    )
    check_against(golden, result)
