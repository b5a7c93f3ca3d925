"""Llama 1 to 3.2 (text), and other models with this architecture: full attention and a gated MLP,
each after a norm.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag
from models.decoders.decoder import Decoder
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DenseConfig):
    """The config of Llama models. `AttentionConfig` has the biases of attention."""

    mlp_bias: bool


class LlamaForCausalLM(Decoder):
    """Attention and a gated MLP, each after a norm and added to the residual stream."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return LlamaConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )

    def __init__(self, config: LlamaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            PreNormLayer(
                attention=Attention(attention, dtype=dtype),
                mlp=GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    use_bias=config.mlp_bias,
                    dtype=dtype,
                ),
                norm=norm,
            )
            for attention in config.attention
        ]
        super().__init__(
            config, layers=layers, norm=norm(), has_head_kernel=has_head_kernel, dtype=dtype
        )
