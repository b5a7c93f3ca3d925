"""MPT: ALiBi in place of positions, and layer norms without biases."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import LayerNormConfig, read_layer_norm_fields
from models.config.fields import read_number, read_object, read_optional_number, refuse_other_values
from models.decoders.dense_decoder import DenseDecoder
from models.families.bloom import read_alibi_attention
from models.layers.attention import Attention
from models.layers.attention_variants import ClippedAttention
from models.layers.layer_norm import UnbiasedLayerNorm
from models.layers.mlp import PlainMLP
from models.layers.packed_weights import with_packed_qkv
from models.weight_rule import WeightRule, with_stored_names

# Names of fields in other families -> names in MPT, and the defaults.
_NAMES = {
    "hidden_size": ("d_model", 2048),
    "num_attention_heads": ("n_heads", 16),
    "num_hidden_layers": ("n_layers", 24),
    "max_position_embeddings": ("max_seq_len", 2048),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
}
_SUPPORTED = {"no_bias": True, "logit_scale": None}
_SUPPORTED_ATTENTION = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.blocks.",
    "model.norm.": "transformer.norm_f.",
    ".self_attn.qkv_proj.": ".attn.Wqkv.",
    ".self_attn.o_proj.": ".attn.out_proj.",
    ".input_layernorm.": ".norm_1.",
    ".post_attention_layernorm.": ".norm_2.",
    ".mlp.": ".ffn.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MptConfig(LayerNormConfig):
    """The config of MPT."""

    qkv_bound: float | None  # bound of projected queries, keys and values


class MptForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/mpt."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MptConfig:
        refuse_other_values(hf_config, _SUPPORTED)
        of_attention = read_object(hf_config, "attn_config")
        refuse_other_values(of_attention, _SUPPORTED_ATTENTION)
        named = {
            name: default if hf_config.get(own) is None else hf_config[own]
            for name, (own, default) in _NAMES.items()
        }
        # transformers computes this inner width, whatever expansion_ratio says.
        named["intermediate_size"] = 4 * int(named["hidden_size"])
        fields = read_layer_norm_fields(
            {**hf_config, **named}, default_activation="gelu", default_tie_word_embeddings=True
        )
        attention = read_alibi_attention(
            named, has_bias=False, max_bias=read_number(of_attention, "alibi_bias_max", 8.0)
        )
        scale = read_optional_number(of_attention, "softmax_scale")
        if scale is not None:
            attention = dataclasses.replace(attention, scale=scale)
        return MptConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            qkv_bound=read_optional_number(of_attention, "clip_qkv") or None,
        )

    def __init__(self, config: MptConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        attention = functools.partial(Attention, dtype=dtype)
        if config.qkv_bound is not None:
            attention = functools.partial(ClippedAttention, bound=config.qkv_bound, dtype=dtype)
        super().__init__(
            config,
            attention=attention,
            mlp=PlainMLP,
            norm=functools.partial(UnbiasedLayerNorm, eps=config.layer_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, and rename most modules."""
        rules = with_packed_qkv(super().weight_rules(), self.config.attention)
        return with_stored_names(rules, _STORED_NAMES)
