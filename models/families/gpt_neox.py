"""GPT-NeoX and Pythia: attention and the MLP in parallel, each with a layer norm of its own."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_flag, with_defaults
from models.config.gpt_fields import is_mask_buffer
from models.config.partial_rotary import parse_partial_rope
from models.decoders.dense_decoder import DenseDecoder
from models.layers.decoder_layers import PreNormLayer
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.layers.packed_weights import with_grouped_qkv
from models.layers.residual_layers import TwoNormParallelLayer
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 2}
# Names of fields in transformers 5, and on the hub.
_OF_HUB = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.layers.": "gpt_neox.layers.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(LayerNormConfig):
    """The config of GPT-NeoX."""

    is_parallel: bool  # whether the MLP reads the input of attention


class GPTNeoXForCausalLM(DenseDecoder):
    """By default, a quarter of each head is rotated.

    Source: arXiv:2204.06745.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GPTNeoXConfig:
        given = {
            name: hf_config[other]
            for name, other in _OF_HUB.items()
            if hf_config.get(other) is not None
        }
        hf_config = with_defaults({**given, **hf_config}, _DEFAULTS)
        fields = read_layer_norm_fields(hf_config, default_activation="gelu")
        heads = read_head_fields({**hf_config, "num_key_value_heads": None, "head_dim": None})
        rope, factor = parse_partial_rope(
            hf_config, fields["max_position_embeddings"], default_factor=0.25
        )
        has_bias = read_flag(hf_config, "attention_bias", True)
        attention = AttentionConfig(
            **heads,
            rope=rope,
            rotary_dim=int(heads["head_dim"] * factor),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        return GPTNeoXConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            is_parallel=read_flag(hf_config, "use_parallel_residual", True),
        )

    def __init__(self, config: GPTNeoXConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            layer=TwoNormParallelLayer if config.is_parallel else PreNormLayer,
            mlp=PlainMLP,
            mlp_bias=True,
            norm=functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, head by head, and rename most modules."""
        rules = with_grouped_qkv(
            super().weight_rules(), self.config.attention, packed="attention.query_key_value"
        )
        return with_stored_names(rules, _STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        return is_mask_buffer(name)
