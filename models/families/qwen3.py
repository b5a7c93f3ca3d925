"""Qwen3, dense: normed queries and keys. Some layers have a sliding window if `config.json` enables
it.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag
from models.decoders.dense_decoder import DenseDecoder
from models.families.qwen2 import windowed_layers
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm


class Qwen3ForCausalLM(DenseDecoder):
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
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
