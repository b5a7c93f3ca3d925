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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGolden:
    """One prompt, its greedy continuation, and the logits that each new token came from."""

    prompt: list[int]
    new_tokens: list[int]
    logits: np.ndarray  # f32[NUM_NEW_TOKENS, vocab]


def serving_golden_file(recipe: str) -> Path:
    return GOLDEN_FOLDER / f"serving_{recipe}.npz"


def write_serving_recipe(folder: Path, recipe: str, **overrides: object) -> Path:
    """Writes the recipe's random checkpoint: std 0.1, untied, so that the text is not constant."""
    return write_random_checkpoint(folder, **(SERVING_RECIPES[recipe] | overrides))


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
