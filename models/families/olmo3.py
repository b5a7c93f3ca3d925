"""OLMo 3: OLMo 2's layers, three with a sliding window to one full layer."""

import dataclasses
from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_flag, read_number, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_ropes_by_layer_type
from models.families.olmo2 import Olmo2ForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "rope_theta": 5e5}


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """By default, every fourth layer is full. Scaled rotary embeddings apply to full layers only.

    Source: huggingface.co/docs/transformers/model_doc/olmo3.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        theta = read_number(hf_config, "rope_theta")
        rope, sliding_rope = parse_ropes_by_layer_type(
            {**hf_config, "rope_local_base_freq": theta}, max_positions
        )
        has_bias = read_flag(hf_config, "attention_bias")
        full = AttentionConfig(
            **read_head_fields(hf_config), rope=rope, qkv_bias=has_bias, out_bias=has_bias
        )
        attention = attention_by_type(
            hf_config,
            [(layer_idx + 1) % 4 != 0 for layer_idx in range(fields["num_layers"])],
            full=full,
            sliding=dataclasses.replace(full, rope=sliding_rope),
            window=read_sliding_window(hf_config, default=4096),
            max_position_embeddings=max_positions,
        )
        return DenseConfig(**fields, attention=attention)
