"""A tiny model whose experts depend only on the token, so that NumPy can compute them."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from models import LoadedModel
from tests.models.random_weights import load_random_model

NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCAB = 4, 8, 2, 60
DENSE_LAYERS = (0,)
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "mlp_only_layers": list(DENSE_LAYERS),
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def write_config(folder: Path) -> Path:
    """A folder from which `load_format="dummy"` makes random weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_token_experts(folder: Path) -> LoadedModel:
    """The model in float32. Its layers add nothing to the residual stream."""
    model = load_random_model(write_config(folder))
    params = [
        jax.device_put(np.zeros_like(param)) if "o_proj" in name or "down_proj" in name else param
        for name, param in zip(model.param_names, model.params, strict=True)
    ]
    return dataclasses.replace(model, params=tuple(params))


def count_choices(
    model: LoadedModel, token_ids: Iterable[int], layer_idx: int
) -> np.ndarray:  # i64[num_experts]
    """Choices of each expert in a layer that all these tokens go through."""
    params = dict(zip(model.param_names, map(np.asarray, model.params), strict=True))
    counts_np = np.zeros(NUM_EXPERTS, np.int64)
    if layer_idx in DENSE_LAYERS:
        return counts_np
    for token_id in token_ids:
        x_np = params["embed_tokens.embedding"][token_id]
        x_np = x_np / np.sqrt((x_np**2).mean() + 1e-6)
        x_np = x_np * params[f"layers.{layer_idx}.post_attention_layernorm.scale"]
        scores_np = x_np @ params[f"layers.{layer_idx}.mlp.gate.kernel"]
        counts_np[np.argsort(scores_np)[-TOP_K:]] += 1
    return counts_np
