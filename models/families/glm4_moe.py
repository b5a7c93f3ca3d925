"""GLM-4.5, GLM-4.6 and GLM-4.7: partial rotary embeddings, and experts as in DeepSeek-V3 in most
layers, with shared experts. The layer for multi-token prediction makes drafts with the method
`mtp`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import (
    read_count,
    read_flag,
    refuse_other_values,
    with_defaults,
)
from models.config.moe_config import (
    read_corrected_choice,
    read_expert_fields,
    read_leading_dense,
)
from models.config.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.config.partial_rotary import parse_partial_rope
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.attention import Attention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5}
_SUPPORTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(CorrectedMoEConfig):
    """The config of GLM-4.5 and its successors."""

    has_head_norms: bool  # whether each head of queries and keys is normed
    num_mtp_layers: int


class Glm4MoeForCausalLM(MoEDecoder):
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
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(Attention, dtype=dtype)
        if config.has_head_norms:
            attention = functools.partial(make_head_normed_attention, norm=norm, dtype=dtype)
        super().__init__(
            config,
            attention=attention,
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
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
