"""StarCoder2: layer norms, an MLP without a gate, and biases. All layers have a sliding window if
`config.json` sets one.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import LayerNormConfig, read_attention, read_layer_norm_fields
from models.config.fields import read_flag, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.families.mistral import equally_windowed_layers
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.018042}


@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2Config(LayerNormConfig):
    """The config of StarCoder2."""

    mlp_bias: bool


class Starcoder2ForCausalLM(DenseDecoder):
    """Source: arXiv:2402.19173."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Starcoder2Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_layer_norm_fields(
            hf_config,
            eps_field="norm_epsilon",
            default_activation="gelu_pytorch_tanh",
            default_tie_word_embeddings=True,
        )
        has_bias = read_flag(hf_config, "use_bias", True)
        attention = read_attention(hf_config, fields, has_bias=has_bias, default_num_kv_heads=2)
        return Starcoder2Config(
            **fields,
            attention=equally_windowed_layers(hf_config, attention, fields, default_window=None),
            mlp_bias=has_bias,
        )

    def __init__(
        self, config: Starcoder2Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        super().__init__(
            config,
            mlp=PlainMLP,
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints call the projections of the MLP c_fc and c_proj."""
        return with_renamed_sources(super().weight_rules(), _stored_name)


def _stored_name(name: str) -> str:
    return name.replace(".mlp.up_proj.", ".mlp.c_fc.").replace(".mlp.down_proj.", ".mlp.c_proj.")
