"""Makes a config.json from the metadata of a GGUF file, and names its tensors."""

import re
from collections.abc import Mapping

import numpy as np

from models.errors import ModelConfigError, UnsupportedModelError
from models.loading.gguf.gguf_file import GGUFFile

# Architecture of a GGUF file -> architecture and model_type of config.json.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
# Divisors of the frequencies of a Llama 3 model. The file has no other trace of its rope scaling.
ROPE_FACTORS = "rope_freqs.weight"
_MAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_config(file: GGUFFile) -> dict[str, object]:
    """The fields that a config.json of the same model would have.

    Raises:
        UnsupportedModelError: paxkv does not read GGUF files of this architecture, or with these
            values.
        ModelConfigError: A value is missing, or of another type.
    """
    fields = _Fields(file)
    architecture, model_type = _ARCHITECTURES[fields.architecture]
    if fields.integer("expert_count", 0):
        raise fields.refusal("expert_count", "experts of GGUF files are not supported")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer(_HEADS)
    head_dim = fields.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.refusal("rope.dimension_count", f"expected the size of a head, {head_dim}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelConfigError(f"{file.path} has no tensor token_embd.weight. Download it again.")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(_KV_HEADS, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, fields),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _main_dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(file.metadata),
    }


def name_in_checkpoint(name: str) -> str:
    """The name of a tensor in Hugging Face layout. Unknown names stay; the loader refuses them."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _OUTER_NAMES.get(name, name)
    layer_idx, part, ending = layer.groups()
    return f"model.layers.{layer_idx}.{_LAYER_NAMES.get(part, part)}.{ending}"


def num_rotated_heads(file: GGUFFile, name: str) -> int | None:
    """Heads of a projection whose rows llama.cpp's converter reordered; None for other tensors.

    It reorders queries and keys of Llama models, because llama.cpp rotates neighboring dimensions.

    Args:
        name: In the file.
    """
    layer = _LAYER.fullmatch(name)
    if file.metadata.get("general.architecture") != "llama" or layer is None:
        return None
    fields = _Fields(file)
    num_heads = fields.integer(_HEADS)
    by_part = {"attn_q": num_heads, "attn_k": fields.integer(_KV_HEADS, num_heads)}
    return by_part.get(layer[2])


class _Fields:
    """Typed reads of metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path} has the architecture {self.architecture!r}; paxkv reads GGUF files "
                f"of {', '.join(_ARCHITECTURES)}. Use the model's safetensors files."
            )

    def get(self, name: str) -> object:
        return self._file.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = int(value[0])  # one number for each layer
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, value, "an integer, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, float):
            raise self._bad(name, value, "a number")
        # float32 in the file: 1e-5 would be 9.999999747378752e-06.
        return float(str(np.float32(value)))

    def refusal(self, name: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._file.path}: {self.architecture}.{name} is {self.get(name)!r}; {reason}. Use "
            "the model's safetensors files."
        )

    def _bad(self, name: str, value: object, wanted: str) -> ModelConfigError:
        return ModelConfigError(
            f"{self._file.path}: {self.architecture}.{name} is {value!r:.80}; expected {wanted}. "
            "Download the file again, or use the model's safetensors files."
        )


def _rope_scaling(file: GGUFFile, fields: _Fields) -> dict[str, object] | None:
    kind = fields.get("rope.scaling.type")
    if ROPE_FACTORS in file.tensors:
        if file.tensors[ROPE_FACTORS].type_name != "F32":
            raise ModelConfigError(f"{file.path}: {ROPE_FACTORS} is not F32. Download it again.")
        factors = file.read_bytes(ROPE_FACTORS).view("<f4").tolist()
        # The factors hold for short and long requests.
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": fields.integer("context_length"),
            "attention_factor": 1.0,
        }
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise fields.refusal("rope.scaling.type", "expected none, linear or yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        length = fields.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    return scaling


def _main_dtype(file: GGUFFile) -> str:
    """The dtype of most bytes; for quantized ones bfloat16, in which most models are published."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.num_bytes
    return _MAIN_DTYPES.get(max(sizes, key=sizes.__getitem__), "bfloat16")


def _end_tokens(metadata: Mapping[str, object]) -> list[int] | None:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return [*dict.fromkeys(token_id for token_id in ids if token_id is not None)] or None
