"""Gemma 3 (text): normed queries and keys, two rotary embeddings, and five sliding-window layers to
one full layer.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.fields import read_count
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_ropes_by_layer_type
from models.families.gemma2 import (
    Gemma2ForCausalLM,
    GemmaConfig,
    read_gemma_fields,
    read_gemma_head_fields,
    read_logits_soft_cap,
)
from models.layers.attention import Attention
from models.layers.rms_norm import OffsetRMSNorm


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2's layers, with norms of queries and keys instead of a soft cap on attention."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GemmaConfig:
        fields = read_gemma_fields(hf_config)
        max_positions, num_layers = fields["max_position_embeddings"], fields["num_layers"]
        logits_soft_cap = read_logits_soft_cap(hf_config)
        rope, sliding_rope = parse_ropes_by_layer_type(hf_config, max_positions)
        full = AttentionConfig(**read_gemma_head_fields(hf_config), rope=rope)
        window = read_sliding_window(hf_config, default=4096)
        # Pattern 3 -> sliding, sliding, full, sliding, sliding, full, ...
        pattern = read_count(hf_config, "sliding_window_pattern", 6)
        attention = attention_by_type(
            hf_config,
            [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)],
            full=full,
            sliding=dataclasses.replace(full, rope=sliding_rope),
            window=window,
            max_position_embeddings=max_positions,
        )
        return GemmaConfig(**fields, attention=attention, logits_soft_cap=logits_soft_cap)

    def make_attention(
        self,
        attention: AttentionConfig,
        norm: functools.partial[OffsetRMSNorm],
        dtype: jnp.dtype,
    ) -> Attention:
        return Attention(
            attention,
            q_norm=norm(attention.head_dim),
            k_norm=norm(attention.head_dim),
            dtype=dtype,
        )
