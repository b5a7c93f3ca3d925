"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, and experts in most layers, with one shared
expert. Some layers have a sliding window if `config.json` enables it.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag
from models.config.layer_types import read_layer_types, read_sliding_window, with_window
from models.config.moe_config import read_expert_fields, read_sparse_steps
from models.config.rope_config import parse_rope_config
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import GatedSharedMoEConfig, make_gated_shared_expert
from models.layers.rms_norm import RMSNorm


class Qwen2MoeForCausalLM(MoEDecoder):
    """Llama's layers, with experts in the layers that `has_experts` names.

    Source: arXiv:2407.10671.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GatedSharedMoEConfig:
        fields = read_dense_fields(hf_config)
        attention = AttentionConfig(
            **read_head_fields(hf_config, default_num_kv_heads=16),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=read_flag(hf_config, "qkv_bias", True),
        )
        experts = read_expert_fields(
            hf_config, default_num_experts=60, default_top_k=4, default_size=1408
        )
        return GatedSharedMoEConfig(
            **fields,
            **experts,
            attention=_windowed_layers(hf_config, attention, fields),
            has_experts=read_sparse_steps(hf_config, fields["num_layers"]),
            shared_expert_intermediate_size=read_count(
                hf_config, "shared_expert_intermediate_size", 5632
            ),
            normalizes_weights=read_flag(hf_config, "norm_topk_prob"),
        )

    def __init__(
        self, config: GatedSharedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            sparse_mlp=functools.partial(make_gated_shared_expert, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def _windowed_layers(
    hf_config: Mapping[str, object], attention: AttentionConfig, fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer.

    By default, every second of the first `max_window_layers` layers has a window.
    """
    num_layers = fields["num_layers"]
    window, num_windowed = None, 0
    if read_flag(hf_config, "use_sliding_window"):
        window = read_sliding_window(hf_config, default=4096)
        num_windowed = read_count(hf_config, "max_window_layers", 28, minimum=0)
    is_sliding = [
        window is not None and layer_idx % 2 == 0 and layer_idx < num_windowed
        for layer_idx in range(num_layers)
    ]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    by_type = {
        "full_attention": attention,
        "sliding_attention": with_window(attention, window, fields["max_position_embeddings"]),
    }
    return tuple(by_type[layer_type] for layer_type in layer_types)
