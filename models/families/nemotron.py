"""Nemotron-3 8B, Nemotron-4 and Minitron: layer norms around 1, partial rotary embeddings, and an
MLP with squared ReLU.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_flag, with_defaults
from models.config.partial_rotary import parse_partial_rope
from models.decoders.dense_decoder import DenseDecoder
from models.layers.layer_norm import OffsetLayerNorm
from models.layers.mlp import PlainMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 2, "eos_token_id": 3, "initializer_range": 0.0134}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronConfig(LayerNormConfig):
    """The config of Nemotron."""

    mlp_bias: bool


class NemotronForCausalLM(DenseDecoder):
    """By default, half of each head is rotated.

    Source: arXiv:2402.16819.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> NemotronConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_layer_norm_fields(hf_config, eps_field="norm_eps", default_activation="relu2")
        head_fields = read_head_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=0.5)
        has_bias = read_flag(hf_config, "attention_bias")
        attention = AttentionConfig(
            **head_fields,
            rope=rope,
            rotary_dim=int(head_fields["head_dim"] * factor),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        return NemotronConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )

    def __init__(self, config: NemotronConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetLayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        super().__init__(
            config,
            mlp=PlainMLP,
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
