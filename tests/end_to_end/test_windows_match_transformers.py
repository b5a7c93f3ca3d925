"""Models with sliding windows answer as transformers does, and hold no more than their windows."""

import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, greedy, run_engine
from tests.end_to_end.golden_runs import (
    GREEDY,
    HeldBlocks,
    check_against,
    run_combination,
)
from tests.end_to_end.settings_product import FACTORS, full_product, pairs_of, pairwise_selection
from tests.oracles.serving_golden import (
    LONG_NUM_NEW_TOKENS,
    LONG_POSITIONS,
    NUM_NEW_TOKENS,
    load_long_golden,
    load_serving_golden,
    write_long_recipe,
    write_serving_recipe,
)

RECIPES = ("gemma3", "gemma3_shallow", "mistral_window")
# The normal run compiles for one recipe of few layers and one block size, whose window of 20 tokens
# is no multiple of a block.
QUICK_LEVELS = {
    "recipe": ("gemma3_shallow",),
    "block_size": (16,),
    "max_num_batched_tokens": (16, 64),
}
QUICK_SELECTION = pairwise_selection(**QUICK_LEVELS)


@pytest.mark.parametrize("combination", QUICK_SELECTION, ids=str)
def test_answer_does_not_depend_on_settings(quick_runners, combination: tuple) -> None:
    result = run_combination(quick_runners, combination)
    values = dict(zip(FACTORS, combination, strict=True))
    # In a tiny pool a shared prefix may leave room for all.
    if not (values["has_tiny_pool"] and values["enable_prefix_caching"]):
        assert (result.num_preemptions > 0) == values["has_tiny_pool"]


@pytest.mark.slow
@pytest.mark.parametrize("combination", full_product(recipe=RECIPES), ids=str)
def test_answer_does_not_depend_on_settings_full_product(runners, combination: tuple) -> None:
    run_combination(runners, combination)


def test_selection_holds_every_pair_of_settings() -> None:
    wanted = set().union(*(pairs_of(c) for c in full_product(**QUICK_LEVELS)))
    assert set().union(*(pairs_of(c) for c in QUICK_SELECTION)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen2_window", "gemma2"])
def test_other_mixes_of_layers_answer_as_transformers_does(runners, recipe: str) -> None:
    golden = load_serving_golden(recipe)
    settings = EngineSettings(block_size=8, num_blocks=200, arrival_gap=2)
    prompts = [g.prompt for g in golden]
    result = run_engine(runners(recipe, 8), prompts, settings, sampling_params=GREEDY)
    check_against(golden, result)
    assert sum(result.num_cached_tokens) > 0


@pytest.mark.slow
def test_layers_that_share_one_block_table_answer_the_same(tmp_path) -> None:
    golden = load_serving_golden("gemma3_shallow")
    checkpoint = write_serving_recipe(tmp_path, "gemma3_shallow")
    recording = RecordingRunner(checkpoint, 16, has_unified_kv=True)
    (group,) = recording.runner.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    assert isinstance(spec, FullAttentionSpec) and spec.sliding_window is not None
    settings = EngineSettings(block_size=16, num_blocks=200, max_num_batched_tokens=16)
    prompts = [g.prompt for g in golden]
    check_against(golden, run_engine(recording, prompts, settings, sampling_params=GREEDY))


@pytest.mark.slow
def test_long_sequence_holds_only_what_its_windows_need(tmp_path) -> None:
    golden = load_long_golden()
    recording = RecordingRunner(write_long_recipe(tmp_path), 16, max_model_len=LONG_POSITIONS)
    groups = recording.runner.kv_cache_config.kv_cache_groups
    windows = [
        spec.sliding_window if isinstance(spec := group.kv_cache_spec, SlidingWindowSpec) else None
        for group in groups
    ]
    assert windows == [16] * 6 + [None]
    budget = 512
    held = HeldBlocks([group.kv_cache_spec for group in groups], budget)
    result = run_engine(
        recording,
        [golden.prompt],
        EngineSettings(block_size=16, num_blocks=512, max_num_batched_tokens=budget),
        sampling_params=greedy(1, LONG_NUM_NEW_TOKENS),
        watch=held,
    )
    worst = check_against([golden], result)
    print(
        f"{LONG_POSITIONS} tokens in blocks of 16, windows {windows}: blocks held at the end "
        f"{held.last}, at most {held.most}; largest difference of a logit {worst:.1e}"
    )
    # 16 tokens lie in at most 2 blocks; 512 tokens of a step and the 15 before them in at most 34.
    assert held.last[-1] == 256
    assert max(held.last[:-1]) <= 2
    assert max(held.most[:-1]) <= 34


@pytest.mark.slow
def test_live_transformers_agree(tmp_path) -> None:
    """With torch at hand: a checkpoint and prompts that no golden file has seen."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles.make_golden import load_hf_model
    from tests.oracles.make_serving_golden import make_sequences

    checkpoint = write_serving_recipe(tmp_path / "live", "gemma3_shallow", seed=96)
    golden = make_sequences(load_hf_model(checkpoint), seed=96)
    settings = EngineSettings(block_size=16, num_blocks=40, max_num_batched_tokens=16)
    result = run_engine(
        RecordingRunner(checkpoint, 16),
        [g.prompt for g in golden],
        settings,
        sampling_params=greedy(len(golden), NUM_NEW_TOKENS),
    )
    check_against(golden, result)
