"""Mistral 7B and Nemo: Llama's layers without biases, and a window that all of them share."""

from collections.abc import Mapping

from models.attention_config import AttentionConfig
from models.dense_config import read_dense_fields, read_head_fields
from models.errors import UnsupportedModelError
from models.families.llama import LlamaConfig, LlamaForCausalLM
from models.layer_types import read_layer_types, read_sliding_window, with_window
from models.rope_config import parse_rope_config


class MistralForCausalLM(LlamaForCausalLM):
    """With or without a sliding window."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        fields = read_dense_fields(hf_config)
        num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
        window = read_sliding_window(hf_config, default=4096)
        by_rule = [window is not None] * num_layers
        _check_types(hf_config, by_rule, window)
        attention = AttentionConfig(
            **read_head_fields(hf_config, default_num_kv_heads=8),
            rope=parse_rope_config(hf_config, max_positions),
        )
        return LlamaConfig(
            **fields,
            attention=(with_window(attention, window, max_positions),) * num_layers,
            mlp_bias=False,
        )


def _check_types(hf_config: Mapping[str, object], by_rule: list[bool], window: int | None) -> None:
    layer_types = read_layer_types(hf_config, by_rule, sliding_window=window)
    if [name == "sliding_attention" for name in layer_types] != by_rule:
        # transformers gives every layer the window all the same.
        wanted = "sliding_attention" if window else "full_attention"
        raise UnsupportedModelError(
            f"config.json: layer_types={list(layer_types)} differs from {wanted!r} for every "
            f"layer, which is what this architecture does with sliding_window={window}. "
            "Leave layer_types out."
        )
