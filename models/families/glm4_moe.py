"""GLM-4.5, GLM-4.6 and GLM-4.7: partial rotary embeddings, and experts as in DeepSeek-V3 in most
layers, with shared experts. Layers for multi-token prediction are not loaded.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.attention_config import AttentionConfig
from models.config_fields import (
    read_count,
    read_flag,
    refuse_other_values,
    with_defaults,
)
from models.decoder import Decoder
from models.dense_config import read_dense_fields, read_head_fields
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.experts import make_experts
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SharedExpertsMLP
from models.moe_config import (
    MoEConfig,
    read_corrected_choice,
    read_expert_fields,
    read_leading_dense,
)
from models.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.partial_rotary import parse_partial_rope

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5}
_SUPPORTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(MoEConfig):
    """The config of GLM-4.5 and its successors."""

    has_head_norms: bool  # whether each head of queries and keys is normed
    choose: SigmoidTopK
    shared_intermediate_size: int  # of all shared experts together
    num_mtp_layers: int


class Glm4MoeForCausalLM(Decoder):
    """Llama's layers, with experts in all but the first ones.

    Source: arXiv:2508.06471.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Glm4MoeConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        refuse_other_values(hf_config, _SUPPORTED)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=128,
            default_top_k=8,
            default_size=1408,
        )
        attention = _read_attention(hf_config, fields["max_position_embeddings"])
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return Glm4MoeConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=read_leading_dense(hf_config, fields["num_layers"], default=1),
            has_head_norms=read_flag(hf_config, "use_qk_norm"),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            num_mtp_layers=read_num_mtp_layers(hf_config, default=1),
        )

    def __init__(self, config: Glm4MoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            PreNormLayer(
                attention=_make_attention(attention, config, dtype),
                mlp=(
                    _make_sparse_mlp(config, dtype)
                    if has_experts
                    else _make_mlp(config, config.intermediate_size, dtype)
                ),
                norm=norm,
            )
            for attention, has_experts in zip(config.attention, config.has_experts, strict=True)
        ]
        super().__init__(
            config, layers=layers, norm=norm(), has_head_kernel=has_head_kernel, dtype=dtype
        )

    def ignores_weight(self, name: str) -> bool:
        return is_of_mtp_layer(
            name, num_layers=self.config.num_layers, num_mtp_layers=self.config.num_mtp_layers
        )


def _read_attention(hf_config: Mapping[str, object], max_positions: int) -> AttentionConfig:
    head_fields = read_head_fields(hf_config, default_num_kv_heads=8)
    rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=0.5)
    return AttentionConfig(
        **head_fields,
        rope=rope,
        rotary_dim=int(head_fields["head_dim"] * factor),
        qkv_bias=read_flag(hf_config, "attention_bias"),
    )


def _make_attention(
    attention: AttentionConfig, config: Glm4MoeConfig, dtype: jnp.dtype
) -> Attention:
    if not config.has_head_norms:
        return Attention(attention, dtype=dtype)
    norm = functools.partial(RMSNorm, attention.head_dim, eps=config.rms_norm_eps, dtype=dtype)
    return Attention(attention, q_norm=norm(), k_norm=norm(), dtype=dtype)


def _make_mlp(config: Glm4MoeConfig, intermediate_size: int, dtype: jnp.dtype) -> GatedMLP:
    return GatedMLP(
        config.hidden_size, intermediate_size, activation=config.hidden_act, dtype=dtype
    )


def _make_sparse_mlp(config: Glm4MoeConfig, dtype: jnp.dtype) -> SharedExpertsMLP:
    return SharedExpertsMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
        shared_experts=_make_mlp(config, config.shared_intermediate_size, dtype),
    )
