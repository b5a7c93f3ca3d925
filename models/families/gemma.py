"""Gemma 1: Llama's layers with Gemma's norms, and scaled embeddings."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention
from models.config.fields import read_flag
from models.decoders.dense_decoder import DenseDecoder
from models.families.gemma2 import GemmaConfig, read_gemma_fields
from models.layers.rms_norm import OffsetRMSNorm


class GemmaForCausalLM(DenseDecoder):
    """Source: arXiv:2403.08295."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GemmaConfig:
        activation = hf_config.get("hidden_act")
        # The first releases say "gelu", and mean the tanh form.
        if activation == "gelu":
            activation = None
        fields = read_gemma_fields({**hf_config, "hidden_activation": activation})
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=16,
            default_head_dim=256,
        )
        return GemmaConfig(
            **fields, attention=(attention,) * fields["num_layers"], logits_soft_cap=None
        )

    def __init__(self, config: GemmaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            norm=norm,
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
