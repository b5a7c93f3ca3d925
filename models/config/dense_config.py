"""`DenseConfig` and `LayerNormConfig`: attention and an MLP in every layer; how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.config.attention_config import AttentionConfig
from models.config.fields import read_count, read_number
from models.config.model_config import ModelConfig, read_model_fields
from models.config.rope_config import parse_rope_config
from models.errors import UnsupportedModelError

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"]

# As config.json names them. "swish" and "gelu_new" are older names.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """A decoder whose layers have attention, an MLP and RMS norms."""

    intermediate_size: int
    rms_norm_eps: float
    hidden_act: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(ModelConfig):
    """A decoder whose layers have attention, an MLP and layer norms."""

    intermediate_size: int
    layer_norm_eps: float
    hidden_act: Activation


def read_dense_fields(
    hf_config: Mapping[str, object],
    *,
    activation_field: str = "hidden_act",
    default_activation: Activation = "silu",
    default_tie_word_embeddings: bool = False,
) -> dict[str, object]:
    """The fields of `DenseConfig` except `attention`.

    Defaults equal Hugging Face's configuration class, so that a config.json which leaves a field
    out means the same model here. Raises as `read_model_fields`.
    """
    fields = read_model_fields(hf_config, default_tie_word_embeddings=default_tie_word_embeddings)
    return fields | {
        "intermediate_size": read_count(hf_config, "intermediate_size"),
        "rms_norm_eps": read_number(hf_config, "rms_norm_eps", 1e-6),
        "hidden_act": read_activation(hf_config, activation_field, default_activation),
    }


def read_layer_norm_fields(
    hf_config: Mapping[str, object],
    *,
    eps_field: str = "layer_norm_eps",
    default_activation: Activation = "silu",
    default_tie_word_embeddings: bool = False,
) -> dict[str, object]:
    """The fields of `LayerNormConfig` except `attention`. Defaults are as in `read_dense_fields`.

    Raises: As `read_model_fields`.
    """
    fields = read_model_fields(hf_config, default_tie_word_embeddings=default_tie_word_embeddings)
    return fields | {
        "intermediate_size": read_count(hf_config, "intermediate_size"),
        "layer_norm_eps": read_number(hf_config, eps_field, 1e-5),
        "hidden_act": read_activation(hf_config, "hidden_act", default_activation),
    }


def read_head_fields(
    hf_config: Mapping[str, object],
    *,
    default_num_kv_heads: int | None = None,
    default_head_dim: int | None = None,
) -> dict[str, object]:
    """The sizes and the scale of an `AttentionConfig`.

    Args:
        default_num_kv_heads: Used if config.json leaves it out; None is as many as query heads.
        default_head_dim: Likewise; None is the hidden size over the query heads.
    """
    hidden_size = read_count(hf_config, "hidden_size")
    num_q_heads = read_count(hf_config, "num_attention_heads")
    head_dim = read_count(hf_config, "head_dim", default_head_dim or hidden_size // num_q_heads)
    # As in transformers, null is as many as query heads; only a field left out is the default.
    is_left_out = "num_key_value_heads" not in hf_config
    num_kv_heads = (default_num_kv_heads if is_left_out else None) or num_q_heads
    return {
        "hidden_size": hidden_size,
        "num_q_heads": num_q_heads,
        "num_kv_heads": read_count(hf_config, "num_key_value_heads", num_kv_heads),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }


def read_attention(
    hf_config: Mapping[str, object],
    fields: Mapping[str, object],
    *,
    has_bias: bool = False,
    default_num_kv_heads: int | None = None,
    default_head_dim: int | None = None,
) -> AttentionConfig:
    """Reads the attention of families whose layers have one rotary embedding for whole heads.

    Args:
        fields: The result of `read_dense_fields` or `read_layer_norm_fields`.
        has_bias: Whether queries, keys, values and the output have biases.
        default_num_kv_heads: As in `read_head_fields`.
        default_head_dim: As in `read_head_fields`.
    """
    heads = read_head_fields(
        hf_config, default_num_kv_heads=default_num_kv_heads, default_head_dim=default_head_dim
    )
    rope = parse_rope_config(hf_config, fields["max_position_embeddings"])
    return AttentionConfig(**heads, rope=rope, qkv_bias=has_bias, out_bias=has_bias)


def read_activation(hf_config: Mapping[str, object], field: str, default: Activation) -> Activation:
    """Reads an activation by its name; a missing or empty field is `default`."""
    name = hf_config.get(field) or default
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {field}={name!r} is not supported; paxkv supports "
            f"{', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]
