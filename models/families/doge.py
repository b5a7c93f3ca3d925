"""Doge: logits with a bias for each key, computed from its values, and residual streams with a
trained factor for each feature. No request is longer than `keep_window_size`. Doge with experts is
refused.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag
from models.decoders.dense_decoder import DenseDecoder
from models.errors import UnsupportedModelError
from models.families.llama import LlamaConfig
from models.families.mistral import equally_windowed_layers
from models.layers.dynamic_mask_attention import DynamicMaskAttention, with_key_bias
from models.layers.factors import Factors
from models.layers.rms_norm import RMSNorm
from models.layers.weighted_residual_layer import WeightedResidualLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DogeConfig(LlamaConfig):
    """The config of Doge."""

    keep_window_size: int  # most keys that a query attends to

    @property
    def max_scaled_positions(self) -> int:
        """See `ModelConfig`. In longer sequences, keys with a small bias would be dropped."""
        return min(super(DogeConfig, self).max_scaled_positions, self.keep_window_size)


class DogeForCausalLM(DenseDecoder):
    """Source: arXiv:2412.11834, and huggingface.co/docs/transformers/model_doc/doge."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DogeConfig:
        _refuse_experts(hf_config)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return DogeConfig(
            **fields,
            attention=equally_windowed_layers(
                hf_config, with_key_bias(attention), fields, default_window=None
            ),
            mlp_bias=read_flag(hf_config, "mlp_bias"),
            keep_window_size=read_count(hf_config, "keep_window_size", 2048),
        )

    def __init__(self, config: DogeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_attention(attention: AttentionConfig) -> DynamicMaskAttention:
            q_norm, k_norm = norm(attention.value_head_dim), norm(attention.value_head_dim)
            return DynamicMaskAttention(attention, q_norm=q_norm, k_norm=k_norm, dtype=dtype)

        super().__init__(
            config,
            layer=functools.partial(
                WeightedResidualLayer,
                factors=functools.partial(Factors, config.hidden_size, dtype=dtype),
            ),
            attention=make_attention,
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def _refuse_experts(hf_config: Mapping[str, object]) -> None:
    if read_flag(hf_config, "is_moe"):
        raise UnsupportedModelError(
            "config.json: is_moe=true is not supported for this architecture: transformers chooses "
            "the experts of a token by the router's outputs for other tokens too, so the answer "
            "would depend on how prompts are cut into steps. Use a Doge checkpoint without experts."
        )
