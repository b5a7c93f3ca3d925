"""Granite 3 and Granite 4, dense: Llama's layers with factors of embeddings, outputs and logits."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_flag, read_number, with_defaults
from models.config.rope_config import parse_rope_config
from models.decoders.dense_decoder import DenseDecoder
from models.forward.kernel_settings import KernelSettings
from models.layers.residual_layers import ScaledPreNormLayer
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DenseConfig):
    """The config of Granite."""

    embedding_scale: float  # factor of token embeddings
    residual_scale: float  # factor of the outputs of attention and of the MLP
    logits_scale: float  # factor of logits
    mlp_bias: bool


class GraniteForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/granite."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_granite_fields(hf_config)
        attention = AttentionConfig(
            **read_granite_head_fields(hf_config),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
        )
        return GraniteConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: GraniteConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=functools.partial(ScaledPreNormLayer, residual_scale=config.residual_scale),
            mlp_bias=config.mlp_bias,
            norm=norm,
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale


def read_granite_fields(
    hf_config: Mapping[str, object], *, default_tie_word_embeddings: bool = False
) -> dict[str, object]:
    """Reads the fields of `GraniteConfig` except `attention`."""
    fields = read_dense_fields(hf_config, default_tie_word_embeddings=default_tie_word_embeddings)
    mlp_bias = read_flag(hf_config, "mlp_bias")
    return fields | read_granite_factors(hf_config) | {"mlp_bias": mlp_bias}


def read_granite_factors(hf_config: Mapping[str, object]) -> dict[str, float]:
    """Reads the factors that Granites share. Granite divides logits by a number."""
    return {
        "embedding_scale": read_number(hf_config, "embedding_multiplier", 1.0),
        "residual_scale": read_number(hf_config, "residual_multiplier", 1.0),
        "logits_scale": 1 / read_number(hf_config, "logits_scaling", 1.0),
    }


def read_granite_head_fields(
    hf_config: Mapping[str, object], *, default_num_kv_heads: int | None = None
) -> dict[str, object]:
    """Reads the fields of `AttentionConfig` that Granites share. The scale is a field there."""
    has_bias = read_flag(hf_config, "attention_bias")
    return {
        **read_head_fields(hf_config, default_num_kv_heads=default_num_kv_heads),
        "scale": read_number(hf_config, "attention_multiplier", 1.0),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }
