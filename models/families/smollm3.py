"""SmolLM3: Llama's layers, every fourth of them without positions. Some layers have a sliding
window if `config.json` enables it.
"""

import dataclasses
from collections.abc import Mapping

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.config.layer_types import attention_by_type, read_has_positions, read_sliding_window
from models.families.llama import LlamaConfig, LlamaForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001, "rope_theta": 2e6}


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """With `use_sliding_window`, by default the layers without positions have the window.

    Source: huggingface.co/blog/smollm3.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        max_positions = fields["max_position_embeddings"]
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=4,
        )
        has_positions = read_has_positions(hf_config, fields["num_layers"])
        is_on = read_flag(hf_config, "use_sliding_window")
        window = read_sliding_window(hf_config, default=None) if is_on else None
        layers = attention_by_type(
            hf_config,
            [window is not None and not is_placed for is_placed in has_positions],
            full=attention,
            sliding=attention,
            window=window,
            max_position_embeddings=max_positions,
        )
        return LlamaConfig(
            **fields,
            attention=tuple(
                dataclasses.replace(layer, has_positions=is_placed)
                for layer, is_placed in zip(layers, has_positions, strict=True)
            ),
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )
