"""GPT-2: learned positions, layer norms, and an MLP without a gate."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.config.gpt_fields import is_mask_buffer, with_later_names
from models.config.rope_config import RopeConfig
from models.decoders.learned_positions import LearnedPositionsDecoder
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.layers.packed_weights import with_packed_qkv, with_turned_matrices
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 50256, "eos_token_id": 50256}
# Names of modules here, and in checkpoints of GPT-2 and GPTBigCode.
STORED_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.qkv_proj.": ".attn.c_attn.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


class GPT2LMHeadModel(LearnedPositionsDecoder):
    """Source: "Language Models are Unsupervised Multitask Learners", section 2.3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LayerNormConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, {"add_cross_attention": False})
        fields = read_gpt2_fields(hf_config)
        attention = read_gpt2_attention(hf_config)
        num_layers = fields["num_layers"]
        divisors = [1] * num_layers
        if read_flag(hf_config, "scale_attn_by_inverse_layer_idx"):
            divisors = range(1, num_layers + 1)
        return LayerNormConfig(
            **fields,
            attention=tuple(
                dataclasses.replace(attention, scale=attention.scale / divisor)
                for divisor in divisors
            ),
        )

    def __init__(self, config: LayerNormConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            mlp=PlainMLP,
            mlp_bias=True,
            norm=functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, and store matrices as [in, out]."""
        rules = with_packed_qkv(super().weight_rules(), self.config.attention)
        return with_stored_names(with_turned_matrices(rules), STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        return is_mask_buffer(name)


def read_gpt2_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `LayerNormConfig` except `attention`."""
    return read_layer_norm_fields(
        hf_config, default_activation="gelu_pytorch_tanh", default_tie_word_embeddings=True
    )


def read_gpt2_attention(
    hf_config: Mapping[str, object], *, num_kv_heads: int | None = None
) -> AttentionConfig:
    """Reads the attention of a layer, which has biases and no rotary embedding.

    Args:
        num_kv_heads: None: as many as query heads.
    """
    heads = read_head_fields({**hf_config, "num_key_value_heads": num_kv_heads, "head_dim": None})
    if not read_flag(hf_config, "scale_attn_weights", True):
        heads["scale"] = 1.0
    return AttentionConfig(
        **heads, rope=RopeConfig(theta=10_000.0), has_positions=False, qkv_bias=True, out_bias=True
    )
