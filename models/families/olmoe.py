"""OLMoE: attention that norms all heads together, and a mixture of experts in every layer."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.config.moe_config import read_expert_fields
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.softmax_moe import SoftmaxMoEConfig, make_softmax_experts
from models.layers.dense_layers import make_joint_normed_attention
from models.layers.rms_norm import JoinedHeadsRMSNorm, RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
# Bounds of queries, keys and values, and a window that only some of transformers' kernels apply.
_SUPPORTED = {"clip_qkv": None, "sliding_window": None}


class OlmoeForCausalLM(MoEDecoder):
    """Llama's layers with normed queries and keys, and experts in place of the MLP.

    Source: arXiv:2409.02060.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> SoftmaxMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        refuse_other_values(hf_config, _SUPPORTED)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        experts = read_expert_fields(
            hf_config,
            default_num_experts=64,
            default_top_k=8,
            size_field="intermediate_size",
        )
        return SoftmaxMoEConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
            normalizes_weights=read_flag(hf_config, "norm_topk_prob"),
        )

    def __init__(
        self, config: SoftmaxMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        head_norm = functools.partial(JoinedHeadsRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_joint_normed_attention, norm=head_norm, dtype=dtype),
            sparse_mlp=functools.partial(make_softmax_experts, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
