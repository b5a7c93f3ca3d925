"""Runs a combination of settings through the engine and compares it with its golden sequences."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paxkv.contracts.kv_cache_spec import KVCacheSpec
from paxkv.scheduler.scheduler import Scheduler
from tests.end_to_end.engine_harness import RecordingRunner, RunResult, greedy, run_engine
from tests.end_to_end.settings_product import Combination, settings_of
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


def make_runners(folder: Path, **limits: int) -> Runners:
    """One runner for each recipe and block size, made on first use.

    The eight used last are kept: a process may map no more than so many pieces of compiled code
    (vm.max_map_count), and more runners of many layers than that have crashed the compiler.

    Args:
        limits: Of `RecordingRunner`, so that it compiles fewer programs.
    """

    @functools.lru_cache(maxsize=8)
    def runner(recipe: str, block_size: int) -> RecordingRunner:
        checkpoint = write_serving_recipe(folder / f"{recipe}_{block_size}", recipe)
        return RecordingRunner(checkpoint, block_size, **limits)

    return runner


def check_against(golden: list[ServingGolden], result: RunResult) -> float:
    """Compares a run with its golden one; returns the largest relative difference of a logit."""
    assert result.token_ids == [g.new_tokens for g in golden]
    largest = max(np.abs(g.logits).max() for g in golden)
    worst = 0.0
    for g, rows in zip(golden, result.logits, strict=True):
        # A preempted request computes its prompt again and draws no token twice.
        assert len(rows) == len(g.new_tokens)
        worst = max(worst, float(np.abs(np.stack(rows) - g.logits).max() / largest))
    assert worst < LOGIT_BOUND
    return worst


class HeldBlocks:
    """Watches that no request holds more blocks, null blocks aside, than its layers need.

    Args:
        specs: Format of each KV cache group.
        max_num_batched_tokens: Most tokens of a step.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], max_num_batched_tokens: int) -> None:
        self._specs, self._max_num_batched_tokens = specs, max_num_batched_tokens
        self.last: list[int] = []  # per group, of the request that was looked at last
        self.most = [0] * len(specs)  # of any request

    def __call__(self, scheduler: Scheduler) -> None:
        for request in scheduler.running:
            block_ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            self.last = [sum(block_id != 0 for block_id in group) for group in block_ids]
            self.most = [max(pair) for pair in zip(self.most, self.last, strict=True)]
            for num_held, spec in zip(self.last, self._specs, strict=True):
                assert num_held <= spec.max_held_blocks(
                    max_model_len=scheduler.max_model_len,
                    max_num_batched_tokens=self._max_num_batched_tokens,
                )


def run_combination(runners: Runners, combination: Combination) -> RunResult:
    """Runs one combination and checks it."""

    def specs_of(recipe: str, block_size: int) -> list[KVCacheSpec]:
        config = runners(recipe, block_size).runner.kv_cache_config
        return [group.kv_cache_spec for group in config.kv_cache_groups]

    recipe, settings = settings_of(combination, specs_of)
    golden = load_serving_golden(recipe)
    prompts = [g.prompt for g in golden]
    runner = runners(recipe, settings.block_size)
    held = HeldBlocks(specs_of(recipe, settings.block_size), settings.max_num_batched_tokens)
    result = run_engine(runner, prompts, settings, sampling_params=GREEDY, watch=held)
    worst = check_against(golden, result)
    hits = sum(result.num_cached_tokens)
    print(
        f"{combination}: {worst:.1e}, {result.num_preemptions} preemptions, {hits} tokens hit, "
        f"blocks held {held.most}"
    )
    if not settings.enable_prefix_caching:
        assert hits == 0
    return result
