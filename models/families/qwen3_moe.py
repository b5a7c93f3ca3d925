"""Qwen3 with experts, such as Qwen3-30B-A3B: Qwen3's attention, and a mixture of experts in most
layers. All layers have a sliding window if `config.json` enables it.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag
from models.config.layer_types import read_sliding_window, with_window
from models.config.moe_config import read_expert_fields, read_sparse_steps
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.softmax_moe import SoftmaxMoEConfig, make_softmax_experts
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm


class Qwen3MoeForCausalLM(MoEDecoder):
    """Llama's layers with normed queries and keys, and experts in the layers of `has_experts`."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> SoftmaxMoEConfig:
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=4,
        )
        if read_flag(hf_config, "use_sliding_window"):
            window = read_sliding_window(hf_config, default=4096)
            attention = with_window(attention, window, fields["max_position_embeddings"])
        return SoftmaxMoEConfig(
            **fields,
            **read_expert_fields(
                hf_config, default_num_experts=128, default_top_k=8, default_size=768
            ),
            attention=(attention,) * fields["num_layers"],
            has_experts=read_sparse_steps(hf_config, fields["num_layers"]),
            normalizes_weights=read_flag(hf_config, "norm_topk_prob"),
        )

    def __init__(
        self, config: SoftmaxMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(make_softmax_experts, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
