"""Phi-1, Phi-1.5 and Phi-2: attention and the MLP in parallel, layer norms, partial rotary
embeddings, and biases everywhere.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.config.partial_rotary import parse_partial_rope
from models.decoders.biased_head import BiasedHeadDecoder
from models.layers.attention import Attention
from models.layers.decoder_layers import ParallelLayer
from models.layers.dense_layers import make_dense_layers, make_head_normed_attention
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".self_attn.o_proj.": ".self_attn.dense.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(LayerNormConfig):
    """The config of Phi-1, 1.5 and 2."""

    has_head_norms: bool  # whether each head of queries and keys is normed


class PhiForCausalLM(BiasedHeadDecoder):
    """By default, half of each head is rotated. The vocabulary head has a bias.

    Source: arXiv:2309.05463.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> PhiConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, {"tie_word_embeddings": False})
        fields = read_layer_norm_fields(hf_config, default_activation="gelu_pytorch_tanh")
        head_fields = read_head_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=0.5)
        attention = AttentionConfig(
            **head_fields,
            rope=rope,
            rotary_dim=int(head_fields["head_dim"] * factor),
            qkv_bias=True,
            out_bias=True,
        )
        return PhiConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            has_head_norms=read_flag(hf_config, "qk_layernorm"),
        )

    def __init__(self, config: PhiConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        attention = functools.partial(Attention, dtype=dtype)
        if config.has_head_norms:
            attention = functools.partial(make_head_normed_attention, norm=norm, dtype=dtype)
        layers = make_dense_layers(
            config,
            layer=ParallelLayer,
            attention=attention,
            mlp=PlainMLP,
            mlp_bias=True,
            norm=norm,
            dtype=dtype,
        )
        super().__init__(config, layers=layers, norm=norm(config.hidden_size), dtype=dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename most modules."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)
