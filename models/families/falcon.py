"""Falcon: attention and the MLP in parallel in most releases, and ALiBi in Falcon-RW."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_attention, read_layer_norm_fields
from models.config.fields import read_count, read_flag, with_defaults
from models.config.gpt_fields import with_later_names
from models.decoders.dense_decoder import DenseDecoder
from models.errors import UnsupportedModelError
from models.families.bloom import PACKED_QKV, STORED_NAMES, read_alibi_attention
from models.layers.decoder_layers import ParallelLayer, PreNormLayer
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.layers.packed_weights import with_grouped_qkv
from models.layers.residual_layers import TwoNormParallelLayer
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 11, "eos_token_id": 11, "max_position_embeddings": 2048}
# One norm for attention and the MLP, one for each, or attention before the MLP.
_Order = Literal["one norm", "two norms", "in turn"]
_LAYERS = {
    "one norm": ParallelLayer,
    "two norms": TwoNormParallelLayer,
    "in turn": PreNormLayer,
}
# Names of modules here, and in checkpoints with two norms.
_STORED_NORMS = {".input_layernorm.": ".ln_attn.", ".post_attention_layernorm.": ".ln_mlp."}


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(LayerNormConfig):
    """The config of Falcon."""

    order: _Order
    has_bias: bool


class FalconForCausalLM(DenseDecoder):
    """Source: arXiv:2311.16867."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> FalconConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        hf_config |= {"hidden_act": hf_config.get("activation")}
        if hf_config.get("ffn_hidden_size") is not None:
            hf_config["intermediate_size"] = hf_config["ffn_hidden_size"]
        fields = read_layer_norm_fields(
            hf_config, default_activation="gelu", default_tie_word_embeddings=True
        )
        has_bias = read_flag(hf_config, "bias")
        attention = _read_attention(hf_config, fields, has_bias)
        return FalconConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            order=_read_order(hf_config),
            has_bias=has_bias,
        )

    def __init__(self, config: FalconConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            layer=_LAYERS[config.order],
            mlp=PlainMLP,
            mlp_bias=config.has_bias,
            norm=functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, KV head by KV head."""
        rules = with_grouped_qkv(super().weight_rules(), self.config.attention, packed=PACKED_QKV)
        norms = _STORED_NORMS if self.config.order == "two norms" else {}
        return with_stored_names(rules, {**norms, **STORED_NAMES})


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object], has_bias: bool
) -> AttentionConfig:
    num_heads = read_count(hf_config, "num_attention_heads")
    num_kv_heads = num_heads
    if read_flag(hf_config, "new_decoder_architecture"):
        num_kv_heads = read_count(hf_config, "num_kv_heads", num_heads)
    elif read_flag(hf_config, "multi_query", True):
        num_kv_heads = 1
    if not read_flag(hf_config, "alibi"):
        sizes = {**hf_config, "num_key_value_heads": num_kv_heads, "head_dim": None}
        return read_attention(sizes, fields, has_bias=has_bias)
    attention = read_alibi_attention(hf_config, has_bias=has_bias)
    # Falcon scales the bias as it scales the products of queries and keys.
    slopes = tuple(slope * attention.scale for slope in attention.alibi_slopes)
    return dataclasses.replace(attention, num_kv_heads=num_kv_heads, alibi_slopes=slopes)


def _read_order(hf_config: Mapping[str, object]) -> _Order:
    is_new = read_flag(hf_config, "new_decoder_architecture")
    is_parallel = read_flag(hf_config, "parallel_attn", True)
    num_norms = read_count(hf_config, "num_ln_in_parallel_attn", 2 if is_new else 1)
    if not is_parallel and not is_new:
        return "in turn"
    if is_parallel and num_norms == 1:
        return "one norm"
    if is_parallel and num_norms == 2 and is_new:
        return "two norms"
    raise UnsupportedModelError(
        f"config.json: new_decoder_architecture={is_new}, parallel_attn={is_parallel} and "
        f"num_ln_in_parallel_attn={num_norms} do not belong together. No release of Falcon has "
        "these values; use the config.json that was published with the weights."
    )
