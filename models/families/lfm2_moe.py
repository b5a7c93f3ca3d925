"""LFM2 with experts: LFM2's layers, with experts in all but the first ones."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_flag, read_number, refuse_other_values
from models.config.moe_config import MoEConfig, read_expert_fields
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.moe_decoder import MoEDecoder
from models.families.lfm2 import (
    STORED_NAMES,
    make_lfm2_mixer,
    read_lfm2_mixers,
    with_lfm2_fields,
)
from models.layers.experts import make_experts
from models.layers.gated_short_convolution import CONV, GatedShortConvolutionConfig
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SparseMLP, renamed_experts
from models.weight_rule import WeightRule, with_stored_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(MoEConfig):
    """The config of LFM2 with experts. Layers without attention have a `GatedShortConvolution`."""

    choose: SigmoidTopK
    conv: GatedShortConvolutionConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, CONV, self.conv.format())


class Lfm2MoeForCausalLM(MoEDecoder):
    """Source: arXiv:2511.23404."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Lfm2MoeConfig:
        refuse_other_values(hf_config, {"use_expert_bias": True})
        hf_config = with_lfm2_fields(hf_config)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=32, default_top_k=4, default_size=1792
        )
        num_dense = read_count(hf_config, "num_dense_layers", 2, minimum=0)
        return Lfm2MoeConfig(
            **fields,
            **experts,
            **read_lfm2_mixers(hf_config, fields),
            has_experts=tuple(idx >= num_dense for idx in range(fields["num_layers"])),
            choose=SigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob", True),
                factor=read_number(hf_config, "routed_scaling_factor", 1.0),
                sum_offset=1e-6,
            ),
        )

    def __init__(self, config: Lfm2MoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            attention=functools.partial(make_lfm2_mixer, config, dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for most modules."""
        rules = with_renamed_mixers(super().weight_rules(), self.config.attention, CONV)
        rules = with_stored_names(
            rules, {".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias"}
        )
        return with_stored_names(renamed_experts(rules), STORED_NAMES | {".mlp.": ".feed_forward."})


def _make_sparse_mlp(config: Lfm2MoeConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
    )
