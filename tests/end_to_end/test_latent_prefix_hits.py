"""A model with latents finds the same cached prefixes as a dense model.

The normal suite runs the scheduler with the KV cache groups of both models, without a device. The
slow test runs both models, and compares their tokens with those of a run without a prefix cache.
"""

import dataclasses
import random
from pathlib import Path

import pytest

from models.registry import read_config
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, greedy, run_engine
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step

BLOCK_SIZE = 16
MAX_TOKENS = 4
SIZES = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
DENSE = SIZES | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}
LATENT = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
}
# The first holds the blocks of all requests at once; with the second, blocks are evicted.
NUM_BLOCKS = (250, 20)


def make_prompts() -> list[list[int]]:
    """32 questions about four documents of 16 to 90 tokens."""
    rng = random.Random(7)

    def tokens(num: int) -> list[int]:
        return [rng.randrange(3, 768) for _ in range(num)]

    documents = [tokens(length) for length in (16, 37, 64, 90)]
    prompts = [[*documents[i % 4], *tokens(rng.randint(1, 20))] for i in range(32)]
    rng.shuffle(prompts)
    return prompts


PROMPTS = make_prompts()


def longest_hits() -> list[int]:
    """Whole blocks that each prompt has in common with an earlier one, without its last token."""

    def num_common(one: list[int], other: list[int]) -> int:
        pairs = enumerate(zip(one, other, strict=False))
        shorter = min(len(one), len(other))
        return next((idx for idx, (a, b) in pairs if a != b), shorter)

    return [
        max((min(num_common(p, q), len(p) - 1) for q in PROMPTS[:i]), default=0)
        // BLOCK_SIZE
        * BLOCK_SIZE
        for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_groups_of_latents_find_the_prefixes_that_groups_of_heads_find(num_blocks: int) -> None:
    hits = {}
    for name, hf_config in (("dense", DENSE), ("latent", LATENT)):
        groups = groups_of_spec(read_config(hf_config).spec("float32"), block_size=BLOCK_SIZE)
        (group,) = groups.kv_cache_groups
        scheduler = make_scheduler(
            specs=(group.kv_cache_spec,), num_blocks=num_blocks, max_model_len=128
        )
        runner = FunctionRunner()
        requests = []
        for idx, prompt in enumerate(PROMPTS):
            requests.append(add(scheduler, str(idx), prompt, max_tokens=MAX_TOKENS))
            step(scheduler, runner)
            scheduler.check_invariants()
        while scheduler.has_unfinished_requests():
            step(scheduler, runner)
        hits[name] = [request.num_cached_tokens for request in requests]
    assert hits["latent"] == hits["dense"]
    assert (hits["latent"] == longest_hits()) == (num_blocks == NUM_BLOCKS[0])


@pytest.mark.slow
def test_hits_of_latents_change_no_token(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.end_to_end.parity import make_checkpoint

    hits = {}
    for family in ("qwen3", "deepseek-v3"):
        folder = tmp_path / family
        make_checkpoint(family, folder, 1, is_shallow=True, is_sharp=True)
        recording = RecordingRunner(
            folder, BLOCK_SIZE, max_num_batched_tokens=64, has_few_sizes=True
        )
        for num_blocks in NUM_BLOCKS:
            settings = EngineSettings(block_size=BLOCK_SIZE, num_blocks=num_blocks, arrival_gap=2)
            params = greedy(len(PROMPTS), MAX_TOKENS)
            cached = run_engine(recording, PROMPTS, settings, sampling_params=params)
            settings = dataclasses.replace(settings, enable_prefix_caching=False)
            computed = run_engine(recording, PROMPTS, settings, sampling_params=params)
            assert cached.token_ids == computed.token_ids
            assert sum(cached.num_cached_tokens) > 0 == sum(computed.num_cached_tokens)
            hits[family, num_blocks] = cached.num_cached_tokens
    for num_blocks in NUM_BLOCKS:
        assert hits["deepseek-v3", num_blocks] == hits["qwen3", num_blocks]
