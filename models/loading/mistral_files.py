"""Mistral's own files: params.json and consolidated.safetensors, without a config.json."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.errors import ModelConfigError, UnsupportedModelError
from models.loading.halves_of_heads import halves_of_heads
from models.loading.json_file import read_json_object
from models.loading.safetensors_reader import SafetensorsCheckpoint

PARAMS_FILE = "params.json"
WEIGHTS_FILE = "consolidated.safetensors"
# Names in params.json -> in config.json.
_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
}
_OPTIONAL = ("sliding_window", "tied_embeddings", "max_seq_len", "max_position_embeddings")
# Fields that paxkv does not need.
_WITHOUT_EFFECT = ("model_type", "causal", "dtype")
# For a params.json without a length, such as that of Mistral 7B v0.3.
_DEFAULT_LENGTH = 32_768
_OUTER_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
# Fields of `moe` in params.json -> in config.json.
_EXPERT_FIELDS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
_LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_EXPERT_PART = "feed_forward.experts."


def has_mistral_files(folder: Path) -> bool:
    """Whether the folder has Mistral's own files, and no config.json, which takes precedence."""
    return (folder / PARAMS_FILE).is_file() and not (folder / "config.json").exists()


def make_mistral_config(folder: Path) -> dict[str, object]:
    """The fields that a config.json of the same model would have.

    Raises:
        ModelConfigError: params.json is malformed, or lacks a field.
        UnsupportedModelError: It has fields of a model other than a Mistral or Mixtral for text.
    """
    path = folder / PARAMS_FILE
    params = read_json_object(path)
    if missing := [name for name in _FIELDS if params.get(name) is None]:
        raise ModelConfigError(
            f"{path} has no {', '.join(missing)}. Use the release of the model in Hugging Face "
            "layout."
        )
    known = {*_FIELDS, *_OPTIONAL, *_WITHOUT_EFFECT}
    experts = params.get("moe")
    if isinstance(experts, dict) and experts.keys() == _EXPERT_FIELDS.keys():
        known.add("moe")
    # False, null and empty objects switch a part off.
    if others := sorted(name for name, value in params.items() if value and name not in known):
        raise UnsupportedModelError(
            f"{path} has {', '.join(others)}; paxkv reads Mistral's own files of text models that "
            "are dense or have Mixtral's experts. Use the release of the model in Hugging Face "
            "layout."
        )
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _DEFAULT_LENGTH
    family = "Mixtral" if "moe" in known else "Mistral"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_act": "silu",
        **{own: params[name] for name, own in _FIELDS.items()},
        **{own: experts[name] for name, own in _EXPERT_FIELDS.items() if family == "Mixtral"},
        "max_position_embeddings": length,
        "sliding_window": params.get("sliding_window"),
        "tie_word_embeddings": params.get("tied_embeddings") or False,
        # All of Mistral's tokenizers have these.
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


class MistralCheckpoint(SafetensorsCheckpoint):
    """consolidated.safetensors, with the names and rows of Hugging Face layout."""

    def __init__(self, folder: Path) -> None:
        """As `SafetensorsCheckpoint`."""
        super().__init__(folder, single_file=WEIGHTS_FILE)
        params: Mapping[str, object] = read_json_object(folder / PARAMS_FILE)
        self._num_heads = {"wq": params["n_heads"], "wk": params["n_kv_heads"]}
        self.rename({name: _name_in_checkpoint(name) for name in self.weights})

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        weight_np = super().read(name)
        num_heads = self._num_heads.get(self.weights[name].name.split(".")[-2])
        return weight_np if num_heads is None else halves_of_heads(weight_np, num_heads)


def _name_in_checkpoint(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _OUTER_NAMES.get(name, name)
    part = _LAYER_NAMES.get(layer[2], layer[2])
    if part.startswith(_EXPERT_PART):
        # Experts keep their numbers, and the names w1, w2 and w3.
        part = f"block_sparse_moe.experts.{part.removeprefix(_EXPERT_PART)}"
    return f"model.layers.{layer[1]}.{part}.weight"
