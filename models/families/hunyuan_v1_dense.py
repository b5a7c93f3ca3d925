"""Hunyuan, dense: Llama's layers with norms of queries and keys after their rotation."""

import functools
import re
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import (
    read_flag,
    read_optional_number,
    refuse_other_values,
    with_defaults,
)
from models.config.rope_config import RopeConfig, parse_rope_config
from models.decoders.dense_decoder import DenseDecoder
from models.layers.attention_variants import NormedLastAttention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
# The hub's config.json has these; transformers computes these values, whatever they say.
_SUPPORTED = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}


class HunYuanDenseV1ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/hunyuan_v1_dense."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        has_bias = read_flag(hf_config, "attention_bias")
        head_fields = read_head_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        attention = AttentionConfig(
            **head_fields,
            rope=parse_hunyuan_rope(hf_config, max_positions, head_dim=head_fields["head_dim"]),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        return DenseConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(
            make_head_normed_attention, norm=norm, attention=NormedLastAttention, dtype=dtype
        )
        super().__init__(
            config,
            attention=attention,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints call the norms of heads query_layernorm and key_layernorm."""
        return with_renamed_sources(super().weight_rules(), hunyuan_name)


def parse_hunyuan_rope(
    hf_config: Mapping[str, object], max_positions: int, *, head_dim: int
) -> RopeConfig:
    """Reads the rotary embedding. With "dynamic" and `alpha`, the base grows once, by `alpha`."""
    rope = parse_rope_config(hf_config, max_positions)
    fields = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    alpha = read_optional_number(fields, "alpha")
    if rope.kind != "dynamic" or alpha is None:
        return rope
    return RopeConfig(theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


def hunyuan_name(name: str) -> str:
    """The name in checkpoints of Hunyuan models."""
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return re.sub(r"\b(q_norm|k_norm)\b", lambda found: names[found[1]], name)
