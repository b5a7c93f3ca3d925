"""The engine's logits and greedy tokens are transformers', whatever the serving settings are."""

import pytest

from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, run_engine
from tests.end_to_end.golden_runs import (
    GREEDY,
    check_against,
    run_combination,
)
from tests.end_to_end.settings_product import (
    FACTORS,
    full_product,
    pairs_of,
    pairwise_selection,
)
from tests.oracles.serving_golden import load_serving_golden, write_serving_recipe

# Each pair of recipe and block size is compiled anew, so the normal run has one of them, with every
# pair of the other settings. Steps of more than 64 tokens would need more programs.
QUICK_LEVELS = {"recipe": ("llama",), "block_size": (8,), "max_num_batched_tokens": (16, 64)}
QUICK_SELECTION = pairwise_selection(**QUICK_LEVELS)


@pytest.mark.parametrize("combination", QUICK_SELECTION, ids=str)
def test_answer_does_not_depend_on_settings(quick_runners, combination: tuple) -> None:
    result = run_combination(quick_runners, combination)
    values = dict(zip(FACTORS, combination, strict=True))
    # In a tiny pool a shared prefix may leave room for all.
    if not (values["has_tiny_pool"] and values["enable_prefix_caching"]):
        assert (result.num_preemptions > 0) == values["has_tiny_pool"]


@pytest.mark.slow
@pytest.mark.parametrize("combination", full_product(), ids=str)
def test_answer_does_not_depend_on_settings_full_product(runners, combination: tuple) -> None:
    run_combination(runners, combination)


def test_selection_holds_every_pair_of_settings() -> None:
    wanted = set().union(*(pairs_of(c) for c in full_product(**QUICK_LEVELS)))
    assert set().union(*(pairs_of(c) for c in QUICK_SELECTION)) == wanted
    assert len(QUICK_SELECTION) < len(full_product(**QUICK_LEVELS)) / 3


@pytest.mark.parametrize(("enable_prefix_caching", "min_preemptions"), [(False, 5), (True, 2)])
def test_tiny_pool_preempts_several_times_and_answers_the_same(
    llama_runner, enable_prefix_caching: bool, min_preemptions: int
) -> None:
    golden = load_serving_golden("llama")
    settings = EngineSettings(
        block_size=8, num_blocks=18, enable_prefix_caching=enable_prefix_caching
    )
    prompts = [g.prompt for g in golden]
    result = run_engine(llama_runner, prompts, settings, sampling_params=GREEDY)
    check_against(golden, result)
    assert result.num_preemptions >= min_preemptions


def test_admitting_whole_prompts_only_preempts_less_and_answers_the_same(llama_runner) -> None:
    golden = load_serving_golden("llama")
    num_preemptions = []
    for full_sequence_must_fit in (False, True):
        settings = EngineSettings(
            block_size=8,
            num_blocks=18,
            enable_prefix_caching=False,
            full_sequence_must_fit=full_sequence_must_fit,
        )
        prompts = [g.prompt for g in golden]
        result = run_engine(llama_runner, prompts, settings, sampling_params=GREEDY)
        check_against(golden, result)
        num_preemptions.append(result.num_preemptions)
    assert num_preemptions[1] < num_preemptions[0]


def test_second_prompt_with_the_same_prefix_hits_it(llama_runner) -> None:
    golden = load_serving_golden("llama")
    settings = EngineSettings(block_size=8, num_blocks=128, arrival_gap=3)
    prompts = [g.prompt for g in golden]
    result = run_engine(llama_runner, prompts, settings, sampling_params=GREEDY)
    check_against(golden, result)
    # 80 shared tokens are ten full blocks of 8, and 33 are four.
    assert result.num_cached_tokens == [0, 80, 0, 32, 0, 0]


@pytest.mark.slow
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
