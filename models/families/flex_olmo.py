"""FlexOlmo: OLMo 2's layers with experts in place of the MLP."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_joint_normed_attention
from models.layers.experts import make_experts
from models.layers.residual_layers import PostNormLayer
from models.layers.rms_norm import RoundedLastJoinedHeadsRMSNorm, RoundedLastRMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"eos_token_id": 100257, "rope_theta": 500000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexOlmoConfig(MoEConfig):
    """The config of FlexOlmo."""

    choose: SoftmaxTopK


class FlexOlmoForCausalLM(MoEDecoder):
    """Attention and experts, whose outputs are normed before they are added.

    Source: arXiv:2507.07024.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> FlexOlmoConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        experts = read_expert_fields(
            hf_config, default_num_experts=7, default_top_k=5, size_field="intermediate_size"
        )
        return FlexOlmoConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
            choose=SoftmaxTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob"),
            ),
        )

    def __init__(self, config: FlexOlmoConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        eps = config.rms_norm_eps
        joint_norm = functools.partial(RoundedLastJoinedHeadsRMSNorm, eps=eps, dtype=dtype)

        def make_experts_of_layer() -> SparseMLP:
            return SparseMLP(
                gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
                choose=config.choose,
                experts=make_experts(config, dtype=dtype),
            )

        super().__init__(
            config,
            layer=PostNormLayer,
            attention=functools.partial(make_joint_normed_attention, norm=joint_norm, dtype=dtype),
            sparse_mlp=make_experts_of_layer,
            norm=functools.partial(RoundedLastRMSNorm, eps=eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
