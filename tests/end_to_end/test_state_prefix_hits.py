"""Models with states find a system prompt that other requests had, wherever it ends.

The normal suite runs the scheduler with the KV cache groups of each model, without a device. The
slow test runs the models, and compares their tokens with those of a run without a prefix cache.
"""

import dataclasses
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.registry import read_config
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, greedy, run_engine
from tests.end_to_end.parity import make_checkpoint
from tests.oracles import families
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step

FAMILIES = ("qwen3-next", "bamba", "kimi-linear", "jamba")
BLOCK_SIZE, MAX_MODEL_LEN, MAX_TOKENS = 16, 640, 4
NUM_REQUESTS = 32
# The first two requests show where the system prompt ends; its state is saved then.
MIN_HITS = NUM_REQUESTS - 2


def prompts_with_beginning(num_shared: int) -> list[list[int]]:
    """Prompts with one beginning and unlike endings of 5 to 200 tokens."""
    rng = random.Random(num_shared)

    def tokens(num: int) -> list[int]:
        return [rng.randrange(3, families.VOCAB) for _ in range(num)]

    beginning = tokens(num_shared)
    return [beginning + tokens(rng.randint(5, 200)) for _ in range(NUM_REQUESTS)]


def num_hits(num_cached_tokens: list[int], num_shared: int) -> int:
    """The requests that found all full blocks of the system prompt."""
    wanted = num_shared // BLOCK_SIZE * BLOCK_SIZE
    return sum(num >= wanted for num in num_cached_tokens)


@pytest.mark.parametrize(
    ("family", "num_shared"),
    [
        ("qwen3-next", 300),
        ("bamba", 400),
        ("kimi-linear", 300),
        ("kimi-linear", 400),
        ("jamba", 400),
    ],
)
def test_groups_of_states_find_a_system_prompt(family: str, num_shared: int) -> None:
    config = families.FAMILIES[family]()
    hf_config = config.to_dict() | {"architectures": [families.model_class(config).__name__]}
    groups = groups_of_spec(read_config(hf_config).spec("float32"), block_size=BLOCK_SIZE)
    scheduler = make_scheduler(
        specs=tuple(group.kv_cache_spec for group in groups.kv_cache_groups),
        num_blocks=4000,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=512,
    )
    runner = FunctionRunner()
    requests = []
    for idx, prompt in enumerate(prompts_with_beginning(num_shared)):
        requests.append(add(scheduler, str(idx), prompt, max_tokens=MAX_TOKENS))
        while scheduler.has_unfinished_requests():
            step(scheduler, runner)
    scheduler.check_invariants()
    assert num_hits([request.num_cached_tokens for request in requests], num_shared) >= MIN_HITS


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_hits_of_states_change_no_token(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    recording = RecordingRunner(
        tmp_path,
        BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        has_few_sizes=True,
    )
    prompts = prompts_with_beginning(300)
    params = greedy(len(prompts), MAX_TOKENS)
    # Long enough that each request ends before the next one arrives.
    settings = EngineSettings(block_size=BLOCK_SIZE, num_blocks=1000, arrival_gap=30)
    cached = run_engine(recording, prompts, settings, sampling_params=params)
    settings = dataclasses.replace(settings, enable_prefix_caching=False)
    computed = run_engine(recording, prompts, settings, sampling_params=params)
    assert cached.token_ids == computed.token_ids
    assert sum(computed.num_cached_tokens) == 0
    assert num_hits(cached.num_cached_tokens, 300) >= MIN_HITS
