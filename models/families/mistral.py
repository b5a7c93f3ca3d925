"""Mistral 7B and Mistral Nemo: Llama's layers without biases. All layers have a sliding window if
`config.json` sets one.
"""

from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.layer_types import read_layer_types, read_sliding_window, with_window
from models.errors import UnsupportedModelError
from models.families.llama import LlamaConfig, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's layers, with or without a sliding window."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        fields = read_dense_fields(hf_config)
        attention = read_attention(hf_config, fields, default_num_kv_heads=8)
        layers = equally_windowed_layers(hf_config, attention, fields, default_window=4096)
        return LlamaConfig(**fields, attention=layers, mlp_bias=False)


def equally_windowed_layers(
    hf_config: Mapping[str, object],
    attention: AttentionConfig,
    fields: Mapping[str, object],
    *,
    default_window: int | None,
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer: with `sliding_window`, if config.json has one.

    Args:
        fields: The result of `read_dense_fields`.
        default_window: The window if config.json leaves the field out. None: there is no window.
    """
    num_layers = fields["num_layers"]
    window = read_sliding_window(hf_config, default_window)
    _check_types(hf_config, [window is not None] * num_layers, window)
    return (with_window(attention, window, fields["max_position_embeddings"]),) * num_layers


def _check_types(hf_config: Mapping[str, object], by_rule: list[bool], window: int | None) -> None:
    layer_types = read_layer_types(hf_config, by_rule, sliding_window=window)
    if [name == "sliding_attention" for name in layer_types] != by_rule:
        # transformers ignores `layer_types` here and gives every layer the window.
        wanted = "sliding_attention" if window else "full_attention"
        raise UnsupportedModelError(
            f"config.json: layer_types={list(layer_types)} does not fit sliding_window={window}; "
            f"expected {wanted!r} for every layer. Correct one of the two fields, or remove "
            "layer_types."
        )
