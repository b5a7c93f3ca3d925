"""Random EAGLE-3 heads in the layout of a checkpoint."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
}


def write_eagle3_head(
    folder: Path,
    *,
    vocab_size: int,
    draft_vocab_size: int,
    layer_ids: list[int],
    seed: int = 0,
    layer_name: str = "midlayer",
    **fields: object,
) -> dict[str, np.ndarray]:
    """Writes a checkpoint, and returns its tensors by the names with `midlayer`.

    Args:
        layer_ids: Layers whose inputs the head reads.
        fields: Of its config.json.
    """
    config = CONFIG | {
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
    }
    config |= fields
    rng = np.random.default_rng(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim
    shapes = {
        "fc": (hidden, len(layer_ids) * hidden),
        "midlayer.self_attn.q_proj": (q_width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q_width),
        "midlayer.mlp.gate_proj": (config["intermediate_size"], hidden),
        "midlayer.mlp.up_proj": (config["intermediate_size"], hidden),
        "midlayer.mlp.down_proj": (hidden, config["intermediate_size"]),
        "lm_head": (draft_vocab_size, hidden),
    }
    weights = {
        f"{name}.weight": rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    if draft_vocab_size != vocab_size:
        ids = np.sort(rng.choice(vocab_size, draft_vocab_size, replace=False))
        weights["d2t"] = ids - np.arange(draft_vocab_size)
        weights["t2d"] = np.isin(np.arange(vocab_size), ids)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name.replace("midlayer", layer_name): weight for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors")
    return weights
