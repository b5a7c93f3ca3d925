"""Models with states find the beginning that prompts share, in the shapes of real models.

The normal suite runs the scheduler with Jamba's KV cache groups, without a device. The slow tests
do so for other models. They also run a small Jamba, and compare its tokens with those of a run
without a prefix cache.
"""

import dataclasses
import random
from pathlib import Path

import pytest

from models.registry import read_config
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from tests.aot.body_table import published_configs
from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, greedy, run_engine
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step

BLOCK_SIZE, MAX_TOKENS = 16, 4


def make_prompts(num_requests: int, num_shared: int, max_own: int, vocab: int) -> list[list[int]]:
    """Prompts with one beginning and unlike endings of 5 to `max_own` tokens."""
    rng = random.Random(num_shared)
    beginning = [rng.randrange(3, vocab) for _ in range(num_shared)]
    lengths = [rng.randint(5, max_own) for _ in range(num_requests)]
    return [beginning + [rng.randrange(3, vocab) for _ in range(num)] for num in lengths]


@pytest.mark.parametrize(
    ("architecture", "num_requests", "num_shared", "num_blocks"),
    [
        ("JambaForCausalLM", 8, 300, 2_000),
        pytest.param("JambaForCausalLM", 32, 400, 20_000, marks=pytest.mark.slow),
        pytest.param("BambaForCausalLM", 32, 300, 40_000, marks=pytest.mark.slow),
        pytest.param("Qwen3NextForCausalLM", 32, 300, 20_000, marks=pytest.mark.slow),
    ],
)
def test_requests_one_after_another_find_a_shared_system_prompt(
    architecture: str, num_requests: int, num_shared: int, num_blocks: int
) -> None:
    spec = read_config(published_configs()[architecture].fields).spec("bfloat16")
    groups = groups_of_spec(spec, block_size=BLOCK_SIZE).kv_cache_groups
    scheduler = make_scheduler(
        specs=tuple(group.kv_cache_spec for group in groups),
        num_blocks=num_blocks,
        max_model_len=2048,
        max_num_batched_tokens=512,
    )
    runner, requests = FunctionRunner(), []
    for idx, prompt in enumerate(make_prompts(num_requests, num_shared, 200, 1000)):
        requests.append(add(scheduler, str(idx), prompt, max_tokens=MAX_TOKENS))
        while scheduler.has_unfinished_requests():
            step(scheduler, runner)
    num_whole = num_shared // BLOCK_SIZE * BLOCK_SIZE
    # The second prompt shows where the beginning ends, and its state is saved there.
    assert [request.num_cached_tokens for request in requests[2:]] == [num_whole] * (
        num_requests - 2
    )


@pytest.mark.slow
def test_hits_of_jamba_change_no_token(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.end_to_end.parity import make_checkpoint

    make_checkpoint("jamba", tmp_path, 1, is_shallow=True, is_sharp=True)
    recording = RecordingRunner(tmp_path, BLOCK_SIZE, max_num_batched_tokens=64, has_few_sizes=True)
    prompts = make_prompts(32, 100, 20, 768)
    params = greedy(len(prompts), MAX_TOKENS)
    settings = EngineSettings(block_size=BLOCK_SIZE, num_blocks=1000, arrival_gap=8)
    cached = run_engine(recording, prompts, settings, sampling_params=params)
    settings = dataclasses.replace(settings, enable_prefix_caching=False)
    computed = run_engine(recording, prompts, settings, sampling_params=params)
    assert cached.token_ids == computed.token_ids
    assert sum(num >= 96 for num in cached.num_cached_tokens) >= 30
    assert sum(computed.num_cached_tokens) == 0
