"""K-EXAONE: EXAONE 4's attention, and experts as in DeepSeek-V3 in most layers."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, refuse_other_values, with_defaults
from models.config.moe_config import (
    read_corrected_choice,
    read_expert_fields,
    read_leading_dense,
    read_mlp_layer_types,
)
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.families.exaone4 import read_exaone_attention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 53,
    "routed_scaling_factor": 2.5,
}
_SUPPORTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class ExaoneMoeForCausalLM(MoEDecoder):
    """Source: arXiv:2601.01739."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=64, default_top_k=8, default_size=1024
        )
        leading_dense = read_leading_dense(hf_config, fields["num_layers"], default=1)
        num_shared = read_count(hf_config, "num_shared_experts", 1)
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=read_exaone_attention(hf_config, fields),
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            choose=read_corrected_choice(hf_config, experts),
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
        """Checkpoints store the corrections next to the router, not in it."""

        def rename(name: str) -> str:
            return name.replace(".mlp.gate.e_score", ".mlp.e_score")

        return with_renamed_sources(super().weight_rules(), rename)

    def ignores_weight(self, name: str) -> bool:
        """The layers for multi-token prediction are not needed."""
        return name.startswith("mtp.")
