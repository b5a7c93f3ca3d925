"""The random checkpoints that the golden numbers belong to, by name."""

from pathlib import Path

from tests.oracles.make_checkpoint import write_random_checkpoint

# Lengths of the three prompts of every recipe: 48 tokens together. "dynamic" starts within its
# original 32 positions and generates past them.
PROMPT_LENGTHS = (5, 17, 26)
NUM_GREEDY_TOKENS = 12

# Name -> arguments of `write_random_checkpoint`.
# Few layers where the recipe is about one thing, because tests compile every recipe.
RECIPES: dict[str, dict[str, object]] = {
    "llama": {"family": "llama", "seed": 1},
    "llama_biases": {"family": "llama", "seed": 2, "num_layers": 1, "bias": True},
    "llama_tied": {"family": "llama", "seed": 3, "num_layers": 1, "tie": True},
    "mistral": {"family": "mistral", "seed": 4, "num_layers": 1, "rope_theta": 1e6},
    "qwen2": {"family": "qwen2", "seed": 5, "num_layers": 1, "rope_theta": 1e6},
    # Heads wider than hidden_size / num_q_heads, as Qwen3 has them.
    "qwen3": {"family": "qwen3", "seed": 6, "num_layers": 2, "head_dim": 32, "rope_theta": 1e6},
    "rope_linear": {
        "family": "llama",
        "seed": 7,
        "num_layers": 1,
        "rope": {"type": "linear", "factor": 4.0},
    },
    "rope_dynamic": {
        "family": "llama",
        "seed": 8,
        "num_layers": 1,
        "max_position_embeddings": 32,
        "rope": {"rope_type": "dynamic", "factor": 4.0},
    },
    "rope_llama3": {
        "family": "llama",
        "seed": 9,
        "num_layers": 1,
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "rope_yarn": {
        "family": "qwen3",
        "seed": 10,
        "num_layers": 1,
        "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}


def write_recipe(folder: Path, name: str) -> Path:
    """Writes the checkpoint of one recipe."""
    return write_random_checkpoint(folder, **RECIPES[name])
