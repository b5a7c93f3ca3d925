"""Writes GGUF files byte by byte, also of a checkpoint in Hugging Face layout."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ2_XXS": 16}
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
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> Path:
    """Writes a file of version 3.

    Args:
        metadata: Strings, ints (uint32), floats (float32), or lists of one of these.
        tensors: Name -> type, shape as NumPy has it, and data.
    """
    header = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    for name, value in metadata.items():
        header += _string(name) + struct.pack("<I", _type_of(value)) + _value(value)
    offset, data = 0, b""
    for name, (type_name, shape, encoded) in tensors.items():
        header += _string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", TYPE_NUMBERS[type_name], offset)
        data += encoded + b"\0" * (-len(encoded) % 32)
        offset = len(data)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _type_of(value: object) -> int:
    return {int: 4, float: 6, str: 8, list: 9}[type(value)]


def _value(value: object) -> bytes:
    if isinstance(value, list):
        header = struct.pack("<IQ", _type_of(value[0]), len(value))
        return header + b"".join(map(_value, value))
    if isinstance(value, str):
        return _string(value)
    return struct.pack("<I" if isinstance(value, int) else "<f", value)


def metadata_of(folder: Path) -> dict[str, object]:
    """The metadata that llama.cpp's converter writes for a Llama or Qwen3 checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    # Of any vocabulary: paxkv does not read it, and transformers counts it.
    tokens = [f"t{idx}" for idx in range(config["vocab_size"])]
    return {
        "general.architecture": arch,
        "general.name": "random",
        **{f"{arch}.{name}": value for name, value in fields.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }


def convert(
    folder: Path,
    path: Path,
    *,
    type_name: str = "F32",
    encode: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    metadata: Mapping[str, object] | None = None,
    more: Mapping[str, tuple[str, tuple[int, ...], bytes]] | None = None,
) -> Path:
    """Writes a checkpoint as a GGUF file, and replaces its own matrices by the encoded ones.

    Args:
        type_name: Of all matrices. Vectors are F32, as llama.cpp has them.
        encode: From a matrix to the bytes of its rows, and the matrix that they stand for.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = {}
    for name, weight_np in weights.items():
        rows_np, tensor_type = weight_np, "F32"
        if weight_np.ndim == 2 and encode is not None:
            tensor_type = type_name
            rows_np, weights[name] = encode(weight_np)
        which = name[-len("q_proj.weight") :][0] if "_proj.weight" in name else ""
        if config["model_type"] == "llama" and which in num_heads:
            # `LlamaModel.permute` of llama.cpp's converter.
            rows_np = (
                rows_np.reshape(num_heads[which], 2, -1, rows_np.shape[1])
                .swapaxes(1, 2)
                .reshape(rows_np.shape)
            )
        tensors[_gguf_name(name)] = (tensor_type, weight_np.shape, rows_np.tobytes())
    save_file(weights, folder / "model.safetensors")
    return write_gguf(path, metadata or metadata_of(folder), {**tensors, **(more or {})})


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{ending}"
    _, _, layer_idx, part = stem.split(".", 3)
    return f"blk.{layer_idx}.{_PARTS[part]}.{ending}"
