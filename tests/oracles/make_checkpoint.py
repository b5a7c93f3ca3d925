"""Writes tiny random checkpoints in Hugging Face layout, from NumPy and a seed alone."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
GEMMA_FAMILIES = ("gemma2", "gemma3_text")
NUMPY_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def write_random_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 160,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 3,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 128,
    rope_theta: float = 10_000.0,
    rope: dict[str, object] | None = None,
    tie: bool = False,
    bias: bool = False,
    std: float = 0.1,
    dtype: str = "float32",
    num_shards: int = 1,
    extra_config: dict[str, object] | None = None,
) -> Path:
    """Writes config.json and the weights into `folder`, which is made where it is missing.

    The same arguments always give the same weights, so that golden numbers need only store them.

    Args:
        family: A key of `ARCHITECTURES`, as config.json spells `model_type`.
        rope: What config.json calls `rope_scaling`; None is the plain embedding.
        tie: The vocabulary head is the embedding; no head is written.
        bias: Llama's `attention_bias` and `mlp_bias`, Qwen3's `attention_bias`.
        std: Of every weight; norms get 1 plus that, but for Gemma's, which add the 1 themselves.
        extra_config: Further fields of config.json, or others than those above; sliding windows,
            soft caps and the like.
        num_shards: More than one writes an index and that many files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": tie,
        "attention_bias": bias,
        "mlp_bias": bias,
        "sliding_window": None,
        "hidden_act": "gelu_pytorch_tanh" if family in GEMMA_FAMILIES else "silu",
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in GEMMA_FAMILIES:
        config["hidden_activation"] = config["hidden_act"]
    config |= extra_config or {}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    # RandomState's stream is frozen for good; default_rng's may change with NumPy.
    rng = np.random.RandomState(seed)
    norm_mean = 0.0 if family in GEMMA_FAMILIES else 1.0
    weights = {
        name: _draw_weight(rng, name, shape, std, norm_mean).astype(NUMPY_DTYPES[dtype])
        for name, shape in weight_shapes(config).items()
    }
    _write_weights(folder, weights, num_shards)
    return folder


def weight_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Lists every weight of a checkpoint with its stored shape, in a fixed order."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    family, head_dim = config["model_type"], config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim
    may_have_bias = family in ("llama", "qwen3", *GEMMA_FAMILIES)
    has_attention_bias = may_have_bias and config["attention_bias"]
    has_qkv_bias = has_attention_bias or family == "qwen2"
    has_mlp_bias = family == "llama" and config["mlp_bias"]
    # projection -> (out, in, has bias)
    projections = {
        "self_attn.q_proj": (q_width, hidden, has_qkv_bias),
        "self_attn.k_proj": (kv_width, hidden, has_qkv_bias),
        "self_attn.v_proj": (kv_width, hidden, has_qkv_bias),
        "self_attn.o_proj": (hidden, q_width, has_attention_bias),
        "mlp.gate_proj": (intermediate, hidden, has_mlp_bias),
        "mlp.up_proj": (intermediate, hidden, has_mlp_bias),
        "mlp.down_proj": (hidden, intermediate, has_mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer_idx in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer_idx}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if family in GEMMA_FAMILIES:
            shapes[f"{prefix}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_feedforward_layernorm.weight"] = (hidden,)
        if family in ("qwen3", "gemma3_text"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        for name, (num_out, num_in, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (num_out,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _draw_weight(
    rng: np.random.RandomState, name: str, shape: tuple[int, ...], std: float, norm_mean: float
) -> np.ndarray:
    mean = norm_mean if "norm" in name else 0.0
    return mean + std * rng.standard_normal(shape)


def _write_weights(folder: Path, weights: dict[str, np.ndarray], num_shards: int) -> None:
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata=metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard_idx in range(num_shards):
        file_name = f"model-{shard_idx + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: weights[name] for name in names[shard_idx::num_shards]}
        save_file(shard, folder / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
