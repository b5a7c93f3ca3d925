"""Hunyuan 3: norms of queries and keys, and experts as in DeepSeek-V3 in most layers."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import (
    read_count,
    read_flag,
    read_number,
    refuse_other_values,
    with_defaults,
)
from models.config.moe_config import read_expert_fields, read_leading_dense, read_mlp_layer_types
from models.config.mtp_layers import is_of_mtp_layer
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.layers.routing import SigmoidTopK
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "initializer_range": 0.006}
_SUPPORTED = {"mlp_bias": False}


class HYV3ForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/hy_v3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=8,
            default_head_dim=128,
        )
        experts = read_expert_fields(
            hf_config, default_num_experts=192, default_top_k=8, default_size=1536
        )
        leading_dense = read_leading_dense(hf_config, fields["num_layers"], default=1)
        num_shared = read_count(hf_config, "num_shared_experts", 1)
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            choose=SigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                factor=read_number(hf_config, "router_scaling_factor", 2.826),
            ),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
        )

    def __init__(
        self, config: CorrectedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for the router, its corrections and the shared experts."""

        def rename(name: str) -> str:
            name = name.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias")
            name = name.replace(".mlp.gate.", ".mlp.router.gate.")
            return name.replace(".shared_experts.", ".shared_mlp.")

        return with_renamed_sources(super().weight_rules(), rename)

    def ignores_weight(self, name: str) -> bool:
        """The release has one layer for multi-token prediction, which config.json does not name."""
        return is_of_mtp_layer(name, num_layers=self.config.num_layers, num_mtp_layers=1)
