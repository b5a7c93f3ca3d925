"""OPT: learned positions, layer norms, and an MLP with ReLU. OPT-350m is not supported."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.gpt_fields import with_later_names
from models.config.rope_config import RopeConfig
from models.decoders.learned_positions import LearnedPositionsDecoder
from models.errors import UnsupportedModelError
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 2, "eos_token_id": 2}
# OPT-350m has other values, and norms after attention and the MLP.
_SUPPORTED = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
}
_POSITION_OFFSET = 2
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".post_attention_layernorm.": ".final_layer_norm.",
    ".input_layernorm.": ".self_attn_layer_norm.",
    "model.norm.": "model.final_layer_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".mlp.up_proj.": ".fc1.",
    ".mlp.down_proj.": ".fc2.",
    "model.": "model.decoder.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(LayerNormConfig):
    """The config of OPT."""

    mlp_bias: bool


class OPTForCausalLM(LearnedPositionsDecoder):
    """Source: arXiv:2205.01068."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> OPTConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        hf_config |= {
            "intermediate_size": hf_config.get("ffn_dim"),
            "initializer_range": hf_config.get("init_std"),
        }
        fields = read_layer_norm_fields(
            {**hf_config, "layer_norm_eps": None},
            default_activation="relu",
            default_tie_word_embeddings=True,
        )
        width = read_count(hf_config, "word_embed_proj_dim", fields["hidden_size"])
        if width != fields["hidden_size"]:
            raise UnsupportedModelError(
                f"config.json: word_embed_proj_dim={width} differs from hidden_size="
                f"{fields['hidden_size']}, which is not supported. Only OPT-350m has it; use "
                "another size of OPT."
            )
        has_bias = read_flag(hf_config, "enable_bias", True)
        heads = read_head_fields({**hf_config, "num_key_value_heads": None, "head_dim": None})
        attention = AttentionConfig(
            **heads,
            rope=RopeConfig(theta=10_000.0),
            has_positions=False,
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        return OPTConfig(**fields, attention=(attention,) * fields["num_layers"], mlp_bias=has_bias)

    def __init__(self, config: OPTConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            position_offset=_POSITION_OFFSET,
            mlp=PlainMLP,
            mlp_bias=config.mlp_bias,
            norm=functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints rename most modules."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)
