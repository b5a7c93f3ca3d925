"""LFM2, dense: a gated convolution of three tokens in place of attention in most layers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import (
    read_count,
    read_flag,
    read_layer_numbers,
    read_number,
    with_defaults,
)
from models.config.rope_config import with_default_rope
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.dense_decoder import DenseDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.gated_short_convolution import (
    CONV,
    GatedShortConvolution,
    GatedShortConvolutionConfig,
)
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
LFM2_DEFAULTS = {
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
# Names of modules here, and in checkpoints.
STORED_NAMES = {
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    "model.norm.": "model.embedding_norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DenseConfig):
    """The config of LFM2. Layers without attention have a `GatedShortConvolution`."""

    conv: GatedShortConvolutionConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, CONV, self.conv.format())


class Lfm2ForCausalLM(DenseDecoder):
    """Source: arXiv:2511.23404."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Lfm2Config:
        hf_config = with_lfm2_fields(hf_config)
        fields = read_dense_fields(hf_config) | {"intermediate_size": _read_inner_size(hf_config)}
        return Lfm2Config(**fields, **read_lfm2_mixers(hf_config, fields))

    def __init__(self, config: Lfm2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            attention=functools.partial(make_lfm2_mixer, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for most modules."""
        rules = with_renamed_mixers(super().weight_rules(), self.config.attention, CONV)
        return with_stored_names(rules, STORED_NAMES)


def with_lfm2_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json with defaults, and with the field names of other families."""
    older = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    renamed = {new: hf_config[old] for old, new in older.items() if hf_config.get(old) is not None}
    hf_config = with_default_rope(with_defaults({**hf_config, **renamed}, LFM2_DEFAULTS), _ROPE)
    return hf_config | {"rms_norm_eps": read_number(hf_config, "norm_eps"), "hidden_act": "silu"}


def read_lfm2_mixers(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> dict[str, object]:
    """Reads the fields `attention` and `conv`.

    Args:
        fields: The result of `read_dense_fields`.
    """
    attention = read_attention(hf_config, fields)
    num_layers = fields["num_layers"]
    full = read_layer_numbers(hf_config, "full_attn_idxs")
    by_rule = [full is not None and idx not in full for idx in range(num_layers)]
    return {
        "attention": tuple(
            None if has_state else attention
            for has_state in read_has_state(hf_config, by_rule, CONV)
        ),
        "conv": read_conv(hf_config),
    }


def read_conv(hf_config: Mapping[str, object]) -> GatedShortConvolutionConfig:
    """Reads the sizes of the convolutions."""
    return GatedShortConvolutionConfig(
        hidden_size=read_count(hf_config, "hidden_size"),
        kernel_size=read_count(hf_config, "conv_L_cache", 3, minimum=2),
        use_bias=read_flag(hf_config, "conv_bias"),
    )


def make_lfm2_mixer(
    config: Lfm2Config, dtype: jnp.dtype, attention: AttentionConfig | None
) -> SelfAttention:
    """Makes attention with normed heads, or for None a `GatedShortConvolution`."""
    if attention is None:
        return GatedShortConvolution(config.conv, dtype=dtype)
    norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
    return make_head_normed_attention(attention, norm=norm, dtype=dtype)


def _read_inner_size(hf_config: Mapping[str, object]) -> int:
    """The inner width of the MLP, computed from `intermediate_size` as transformers does."""
    size = read_count(hf_config, "intermediate_size")
    if not read_flag(hf_config, "block_auto_adjust_ff_dim", True):
        return size
    factor = read_number(hf_config, "block_ffn_dim_multiplier", 1.0)
    step = read_count(hf_config, "block_multiple_of", 256)
    return -(-int(factor * int(2 * size / 3)) // step) * step
