"""Qwen3 with experts, such as Qwen3-30B-A3B: Qwen3's attention, and a mixture of experts in most
layers. All layers have a sliding window if `config.json` enables it.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag
from models.config.layer_types import read_sliding_window, with_window
from models.config.moe_config import MoEConfig, read_expert_fields, read_sparse_steps
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.experts import make_experts
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(MoEConfig):
    """The config of Qwen3 with experts."""

    normalizes_weights: bool  # whether the weights of the chosen experts are scaled to a sum of 1


class Qwen3MoeForCausalLM(MoEDecoder):
    """Llama's layers with normed queries and keys, and experts in the layers of `has_experts`."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Qwen3MoeConfig:
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
        return Qwen3MoeConfig(
            **fields,
            **read_expert_fields(
                hf_config, default_num_experts=128, default_top_k=8, default_size=768
            ),
            attention=(attention,) * fields["num_layers"],
            has_experts=read_sparse_steps(hf_config, fields["num_layers"]),
            normalizes_weights=read_flag(hf_config, "norm_topk_prob"),
        )

    def __init__(self, config: Qwen3MoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def _make_sparse_mlp(config: Qwen3MoeConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=config.normalizes_weights),
        experts=make_experts(config, dtype=dtype),
    )
