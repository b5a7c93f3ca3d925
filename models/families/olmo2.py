"""OLMo 2: norms after attention and after the MLP, and norms of all heads together."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.layers.dense_layers import make_joint_normed_attention
from models.layers.residual_layers import PostNormLayer
from models.layers.rms_norm import RoundedLastJoinedHeadsRMSNorm, RoundedLastRMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}


class Olmo2ForCausalLM(DenseDecoder):
    """Attention and a gated MLP, whose outputs are normed before they are added.

    Source: arXiv:2501.00656.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return DenseConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        eps = config.rms_norm_eps
        norm = functools.partial(RoundedLastRMSNorm, eps=eps, dtype=dtype)
        joint_norm = functools.partial(RoundedLastJoinedHeadsRMSNorm, eps=eps, dtype=dtype)
        super().__init__(
            config,
            layer=PostNormLayer,
            attention=functools.partial(make_joint_normed_attention, norm=joint_norm, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
