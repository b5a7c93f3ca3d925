"""OLMo 1: Llama's layers with layer norms without parameters, and projections that are clipped if
`config.json` has a bound.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import LayerNormConfig, read_attention, read_layer_norm_fields
from models.config.fields import read_flag, read_optional_number, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.layers.attention import Attention
from models.layers.attention_variants import ClippedAttention
from models.layers.layer_norm import UnscaledLayerNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"eos_token_id": 50279}


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(LayerNormConfig):
    """The config of OLMo 1."""

    clip_bound: float | None  # of queries, keys and values; None: they are not clipped


class OlmoForCausalLM(DenseDecoder):
    """Source: arXiv:2402.00838."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> OlmoConfig:
        # The norms have a fixed epsilon.
        hf_config = with_defaults(hf_config, _DEFAULTS) | {"layer_norm_eps": 1e-5}
        fields = read_layer_norm_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return OlmoConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            clip_bound=read_optional_number(hf_config, "clip_qkv"),
        )

    def __init__(self, config: OlmoConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        attention = functools.partial(Attention, dtype=dtype)
        if config.clip_bound is not None:
            attention = functools.partial(ClippedAttention, bound=config.clip_bound, dtype=dtype)

        def norm(num_features: int) -> UnscaledLayerNorm:
            return UnscaledLayerNorm(eps=config.layer_norm_eps)

        super().__init__(
            config,
            attention=attention,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
