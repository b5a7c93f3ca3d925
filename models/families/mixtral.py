"""Mixtral 8x7B and Mixtral 8x22B: Mistral's attention, and a mixture of experts in every layer. All
layers have a sliding window if `config.json` sets one.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.decoders.moe_decoder import MoEDecoder
from models.families.mistral import equally_windowed_layers
from models.layers.experts import make_experts
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP, block_sparse_moe_rules
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2}


class MixtralForCausalLM(MoEDecoder):
    """Llama's layers, with experts in place of the MLP.

    Source: arXiv:2401.04088.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(hf_config, fields, default_num_kv_heads=8)
        experts = read_expert_fields(
            hf_config,
            default_num_experts=8,
            default_top_k=2,
            size_field="intermediate_size",
        )
        return MoEConfig(
            **fields,
            **experts,
            attention=equally_windowed_layers(hf_config, attention, fields, default_window=None),
            has_experts=(True,) * fields["num_layers"],
        )

    def __init__(self, config: MoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            sparse_mlp=functools.partial(make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        return block_sparse_moe_rules(super().weight_rules())


def make_sparse_mlp(config: MoEConfig, dtype: jnp.dtype) -> SparseMLP:
    """Makes the experts of one layer."""
    return SparseMLP(
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=True),
        experts=make_experts(config, dtype=dtype),
    )
