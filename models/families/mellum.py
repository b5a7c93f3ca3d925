"""Mellum 2: a rotary embedding per layer type, and experts in most layers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_flag
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import MoEConfig, read_expert_fields, read_mlp_layer_types
from models.config.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.config.rope_config import parse_ropes_by_layer_type, with_default_rope
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.experts import make_experts
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP

_DEFAULT_ROPE = {
    "full_attention": {"rope_theta": 500_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MellumConfig(MoEConfig):
    """The config of Mellum 2."""

    choose: SoftmaxTopK
    num_mtp_layers: int


class MellumForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/mellum."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MellumConfig:
        hf_config = with_default_rope(hf_config, _DEFAULT_ROPE)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        experts = read_expert_fields(
            hf_config, default_num_experts=64, default_top_k=8, default_size=896
        )
        return MellumConfig(
            **fields,
            **experts,
            attention=_read_attention(hf_config, num_layers, fields["max_position_embeddings"]),
            has_experts=read_mlp_layer_types(hf_config, (True,) * num_layers),
            choose=SoftmaxTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob", True),
            ),
            num_mtp_layers=read_num_mtp_layers(hf_config, default=0),
        )

    def __init__(self, config: MellumConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_sparse_mlp() -> SparseMLP:
            return SparseMLP(
                gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
                choose=config.choose,
                experts=make_experts(config, dtype=dtype),
            )

        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=make_sparse_mlp,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def ignores_weight(self, name: str) -> bool:
        return is_of_mtp_layer(
            name, num_layers=self.config.num_layers, num_mtp_layers=self.config.num_mtp_layers
        )


def _read_attention(
    hf_config: Mapping[str, object], num_layers: int, max_positions: int
) -> tuple[AttentionConfig, ...]:
    has_bias = read_flag(hf_config, "attention_bias")
    heads = read_head_fields(hf_config, default_num_kv_heads=4, default_head_dim=128)
    full, sliding = (
        AttentionConfig(**heads, rope=rope, qkv_bias=has_bias, out_bias=has_bias)
        for rope in parse_ropes_by_layer_type(hf_config, max_positions)
    )
    return attention_by_type(
        hf_config,
        [False] * num_layers,
        full=full,
        sliding=sliding,
        window=read_sliding_window(hf_config, default=1024),
        max_position_embeddings=max_positions,
    )
