"""Qwen3, dense: normed queries and keys. Some layers have a sliding window if `config.json` enables
it.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config_fields import read_flag
from models.decoder import Decoder
from models.dense_config import DenseConfig, read_attention, read_dense_fields
from models.families.qwen2 import windowed_layers
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm


class Qwen3ForCausalLM(Decoder):
    """Llama's layers. Queries and keys are RMS-normed before they are rotated."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=32,
            default_head_dim=128,
        )
        return DenseConfig(**fields, attention=windowed_layers(hf_config, attention, fields))

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            PreNormLayer(
                attention=Attention(
                    attention,
                    q_norm=norm(attention.head_dim),
                    k_norm=norm(attention.head_dim),
                    dtype=dtype,
                ),
                mlp=GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    dtype=dtype,
                ),
                norm=functools.partial(norm, config.hidden_size),
            )
            for attention in config.attention
        ]
        super().__init__(
            config,
            layers=layers,
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
