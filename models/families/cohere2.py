"""Command R7B and Command A: Command R's layers, three with a sliding window to one full layer
without positions.
"""

import dataclasses
from collections.abc import Mapping

from models.config.dense_config import read_attention
from models.config.fields import read_count, read_flag, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.families.cohere import CohereConfig, CohereForCausalLM, read_cohere_fields

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 5, "eos_token_id": 255_001}


class Cohere2ForCausalLM(CohereForCausalLM):
    """Full layers have no positions. By default, every fourth layer is full.

    Source: arXiv:2504.00698, section 2.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CohereConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_cohere_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        sliding = read_attention(hf_config, fields, has_bias=read_flag(hf_config, "attention_bias"))
        window = read_sliding_window(hf_config, default=4096)
        pattern = read_count(hf_config, "sliding_window_pattern", 4)
        attention = attention_by_type(
            hf_config,
            [
                window is not None and (layer_idx + 1) % pattern != 0
                for layer_idx in range(fields["num_layers"])
            ],
            full=dataclasses.replace(sliding, has_positions=False),
            sliding=sliding,
            window=window,
            max_position_embeddings=max_positions,
        )
        return CohereConfig(**fields, attention=attention, has_head_norms=False)
