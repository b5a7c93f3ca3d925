"""Golden greedy runs for the serving tests: prompts that share prefixes, with all their logits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.oracles.golden import GOLDEN_FOLDER
from tests.oracles.make_checkpoint import write_random_checkpoint

NUM_NEW_TOKENS = 12
# Two prompts share 80 tokens, two share 33, and two share nothing, so blocks of every size are hit.
# Three prompts end just before position 64, so that decoding needs another block of every size.
SHARED_PREFIXES = (80, 80, 33, 33, 0, 0)
OWN_LENGTHS = (21, 7, 25, 28, 60, 5)
SERVING_RECIPES: dict[str, dict[str, object]] = {
    "llama": {"family": "llama", "seed": 21, "max_position_embeddings": 256, "num_layers": 2},
    "qwen3": {
        "family": "qwen3",
        "seed": 22,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "num_layers": 2,
    },
    # The groups of the 26 layers of the smallest Gemma 3, at a quarter of its depth: six of
    # sliding layers and one full. The longest sequence is seven windows long.
    "gemma3": {
        "family": "gemma3_text",
        "seed": 23,
        "max_position_embeddings": 512,
        "num_layers": 7,
        "rope_theta": 1e6,
        "rope": {"rope_type": "linear", "factor": 8.0},
        "extra_config": {
            "sliding_window": 16,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 24,
        },
    },
    # Two groups of one sliding layer and one of a full one: little to compile.
    "gemma3_shallow": {
        "family": "gemma3_text",
        "seed": 27,
        "max_position_embeddings": 256,
        "num_layers": 3,
        "rope_theta": 1e6,
        "extra_config": {
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 24,
        },
    },
    # One group, and a window that is a multiple of no block size.
    "mistral_window": {
        "family": "mistral",
        "seed": 24,
        "max_position_embeddings": 256,
        "num_layers": 2,
        "extra_config": {"sliding_window": 21},
    },
    # 2 full and 3 sliding layers: groups of 2, 2 and 1 in two rows.
    "qwen2_window": {
        "family": "qwen2",
        "seed": 28,
        "max_position_embeddings": 256,
        "num_layers": 5,
        "extra_config": {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    },
    # Soft caps on attention and on the logits.
    "gemma2": {
        "family": "gemma2",
        "seed": 26,
        "max_position_embeddings": 256,
        "num_layers": 2,
        "std": 0.2,
        "extra_config": {
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    },
}

# One sequence of 4,096 tokens in all, 256 windows long; the same weights, with more positions.
LONG_RECIPE, LONG_POSITIONS = "gemma3", 4096
LONG_FILE = GOLDEN_FOLDER / "serving_gemma3_long.npz"
LONG_PROMPT_LEN, LONG_NUM_NEW_TOKENS = 4088, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGolden:
    """One prompt, its greedy continuation, and the logits that each new token came from."""

    prompt: list[int]
    new_tokens: list[int]
    logits: np.ndarray  # f32[len(new_tokens), vocab]


def serving_golden_file(recipe: str) -> Path:
    return GOLDEN_FOLDER / f"serving_{recipe}.npz"


def write_serving_recipe(folder: Path, recipe: str, **overrides: object) -> Path:
    """Writes the recipe's random checkpoint: std 0.1, untied, so that the text is not constant."""
    return write_random_checkpoint(folder, **(SERVING_RECIPES[recipe] | overrides))


def write_long_recipe(folder: Path) -> Path:
    """Writes the checkpoint of the long sequence."""
    return write_serving_recipe(folder, LONG_RECIPE, max_position_embeddings=LONG_POSITIONS)


def draw_prompts(vocab_size: int, rng: np.random.RandomState) -> list[list[int]]:
    """Draws the prompts; ids from 3 on, since the first three are special."""
    prefixes = {
        length: rng.randint(3, vocab_size, length).tolist() for length in sorted({*SHARED_PREFIXES})
    }
    return [
        prefixes[shared] + rng.randint(3, vocab_size, own).tolist()
        for shared, own in zip(SHARED_PREFIXES, OWN_LENGTHS, strict=True)
    ]


def load_serving_golden(recipe: str) -> list[ServingGolden]:
    """Returns the sequences of one recipe, in the order of `SHARED_PREFIXES`."""
    with np.load(serving_golden_file(recipe)) as arrays:
        return [
            ServingGolden(
                prompt=arrays[f"{i}/prompt"].tolist(),
                new_tokens=arrays[f"{i}/new_tokens"].tolist(),
                logits=arrays[f"{i}/logits"],
            )
            for i in range(len(SHARED_PREFIXES))
        ]


def load_long_golden() -> ServingGolden:
    """Returns the long sequence."""
    with np.load(LONG_FILE) as arrays:
        return ServingGolden(
            prompt=arrays["prompt"].tolist(),
            new_tokens=arrays["new_tokens"].tolist(),
            logits=arrays["logits"],
        )
