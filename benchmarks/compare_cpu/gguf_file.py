"""Writes a checkpoint in the shape of a Qwen3 as a GGUF file with the package `gguf`."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, file: Path, weights: str) -> None:
    """Writes all matrices, the embedding too, as `weights`; vectors stay float32.

    Args:
        folder: A checkpoint of `benchmarks.startup.shapes` with a tied head.
        weights: A quantization type of GGUF, such as "Q8_0", or "F32".
    """
    import gguf  # noqa: PLC0415

    config = json.loads((folder / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[weights]
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    # Prompts are token ids, so the file needs no tokenizer.
    writer.add_tokenizer_model("none")
    for name, weight in load_file(folder / "model.safetensors").items():
        weight_np = weight.astype(np.float32)
        gguf_name = _gguf_name(name)
        if weight_np.ndim == 1 or weights == "F32":
            writer.add_tensor(gguf_name, weight_np)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(weight_np, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.weight"
    _, _, layer_idx, part = stem.split(".", 3)
    return f"blk.{layer_idx}.{_PARTS[part]}.weight"
