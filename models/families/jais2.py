"""Jais 2: layer norms, an MLP with squared ReLU and without a gate, and biases."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import LayerNormConfig, read_attention, read_layer_norm_fields
from models.config.fields import read_flag, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 150_024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jais2Config(LayerNormConfig):
    """The config of Jais 2."""

    mlp_bias: bool


class Jais2ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/jais2."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Jais2Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_layer_norm_fields(hf_config, default_activation="relu2")
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias", True)
        )
        return Jais2Config(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias", True),
        )

    def __init__(self, config: Jais2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        super().__init__(
            config,
            mlp=PlainMLP,
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
