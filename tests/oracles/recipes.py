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
    # Windows: the longest sequence of 37 tokens is several of them long, and blocks have 8 tokens.
    "mistral_window": {
        "family": "mistral",
        "seed": 11,
        "num_layers": 2,
        "extra_config": {"sliding_window": 11},
    },
    # The first layer is full, the second slides: two groups in one row.
    "qwen2_window": {
        "family": "qwen2",
        "seed": 12,
        "num_layers": 2,
        "extra_config": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    },
    # 3 sliding and 2 full layers: groups of 2, 1 and 2 layers.
    "qwen3_layer_types": {
        "family": "qwen3",
        "seed": 13,
        "num_layers": 5,
        "extra_config": {
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    },
    "gemma2": {
        "family": "gemma2",
        "seed": 14,
        "num_layers": 3,
        "tie": True,
        "std": 0.2,
        "extra_config": {
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    },
    # Five sliding layers to a full one, in the spelling of transformers 4.
    "gemma3": {
        "family": "gemma3_text",
        "seed": 15,
        "num_layers": 7,
        "tie": True,
        "rope_theta": 1e6,
        "rope": {"rope_type": "linear", "factor": 8.0},
        "extra_config": {
            "sliding_window": 6,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 24,
        },
    },
    # The spelling of transformers 5, with a cap on the logits and an untied head.
    "gemma3_rope_parameters": {
        "family": "gemma3_text",
        "seed": 16,
        "num_layers": 2,
        "extra_config": {
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 5.0,
        },
    },
}


def write_recipe(folder: Path, name: str) -> Path:
    """Writes the checkpoint of one recipe."""
    return write_random_checkpoint(folder, **RECIPES[name])
