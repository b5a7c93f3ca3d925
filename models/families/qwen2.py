"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on queries, keys and values. Some layers
have a sliding window if `config.json` enables it.
"""

from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_rope_config
from models.families.llama import LlamaConfig, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's layers with biases on q, k and v. Later layers may have a sliding window."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        fields = read_dense_fields(hf_config)
        attention = AttentionConfig(
            **read_head_fields(hf_config, default_num_kv_heads=32),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=True,
        )
        return LlamaConfig(
            **fields, attention=windowed_layers(hf_config, attention, fields), mlp_bias=False
        )


def windowed_layers(
    hf_config: Mapping[str, object], attention: AttentionConfig, fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer.

    With `use_sliding_window`, by default the layers from `max_window_layers` on have the window.

    Args:
        fields: The result of `read_dense_fields`.
    """
    num_layers = fields["num_layers"]
    is_on = read_flag(hf_config, "use_sliding_window")
    window = read_sliding_window(hf_config, default=4096) if is_on else None
    first = num_layers
    if window is not None:
        first = read_count(hf_config, "max_window_layers", 28, minimum=0)
    return attention_by_type(
        hf_config,
        [layer_idx >= first for layer_idx in range(num_layers)],
        full=attention,
        sliding=attention,
        window=window,
        max_position_embeddings=fields["max_position_embeddings"],
    )
