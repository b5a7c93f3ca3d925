"""Ministral 3: Llama's layers, with a factor of queries that grows with their position. All layers
have a sliding window if `config.json` sets one.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_optional_number, with_defaults
from models.config.rope_config import RopeConfig, parse_rope_config, with_default_rope
from models.decoders.dense_decoder import DenseDecoder
from models.families.mistral import equally_windowed_layers
from models.layers.attention import Attention
from models.layers.attention_variants import QueryScale, ScaledQueriesAttention
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(DenseConfig):
    """The config of Ministral 3."""

    query_scale: QueryScale | None


class Ministral3ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/ministral3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Ministral3Config:
        hf_config = with_default_rope(with_defaults(hf_config, _DEFAULTS), _DEFAULT_ROPE)
        fields = read_dense_fields(hf_config)
        rope = parse_rope_config(hf_config, fields["max_position_embeddings"])
        attention = AttentionConfig(
            **read_head_fields(
                hf_config,
                default_num_kv_heads=8,
                # A null means the hidden size divided by the number of heads.
                default_head_dim=None if "head_dim" in hf_config else 128,
            ),
            rope=rope,
        )
        return Ministral3Config(
            **fields,
            attention=equally_windowed_layers(hf_config, attention, fields, default_window=None),
            query_scale=read_query_scale(hf_config, rope, fields["max_position_embeddings"]),
        )

    def __init__(
        self, config: Ministral3Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(Attention, dtype=dtype)
        if config.query_scale is not None:
            attention = functools.partial(
                ScaledQueriesAttention, query_scale=config.query_scale, dtype=dtype
            )
        super().__init__(
            config,
            attention=attention,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def read_query_scale(
    hf_config: Mapping[str, object], rope: RopeConfig, max_position_embeddings: int
) -> QueryScale | None:
    """The factors of queries, or None if there is no `llama_4_scaling_beta`.

    Args:
        hf_config: With rope parameters under one of their two names.
    """
    rope_fields = hf_config.get("rope_scaling") or hf_config["rope_parameters"]
    weight = read_optional_number(rope_fields, "llama_4_scaling_beta")
    if weight is None:
        return None
    period = rope.original_max_position_embeddings or max_position_embeddings
    return QueryScale(weight=weight, period=period, offset=0)
