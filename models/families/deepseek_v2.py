"""DeepSeek V2 and V2 Lite: the latent attention of DeepSeek V3, and experts chosen by a softmax."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_number, refuse_other_values, with_defaults
from models.config.latent_config import read_latent_attention
from models.config.moe_config import (
    MoEConfig,
    read_expert_fields,
    read_group_fields,
    read_leading_dense,
)
from models.decoders.moe_decoder import MoEDecoder
from models.errors import UnsupportedModelError
from models.layers.experts import make_experts
from models.layers.latent_attention import LatentAttention
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router
from models.layers.routing_rules import GroupedSoftmaxTopK
from models.layers.sparse_mlp import SharedExpertsMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"topk_method": "greedy", "bos_token_id": 1, "eos_token_id": 2}
_SUPPORTED = {
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(MoEConfig):
    """The config of DeepSeek V2."""

    choose: GroupedSoftmaxTopK
    shared_intermediate_size: int  # inner width of all shared experts together


class DeepseekV2ForCausalLM(MoEDecoder):
    """Source: arXiv:2405.04434."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV2Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_experts"),
            default_num_experts=64,
            default_size=1407,
        )
        attention = read_latent_attention(
            hf_config, fields["max_position_embeddings"], default_q_latent_dim=1536
        )
        num_shared = read_count(hf_config, "n_shared_experts", 2)
        return DeepseekV2Config(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=read_leading_dense(hf_config, fields["num_layers"], default=0),
            choose=_read_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
        )

    def __init__(
        self, config: DeepseekV2Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            attention=functools.partial(LatentAttention, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def _read_choice(hf_config: Mapping[str, object], experts: Mapping[str, int]) -> GroupedSoftmaxTopK:
    top_k, method = experts["num_experts_per_tok"], hf_config["topk_method"]
    groups = {}
    if method == "group_limited_greedy":
        groups = read_group_fields(hf_config, num_experts=experts["num_experts"], top_k=top_k)
    elif method != "greedy":
        raise UnsupportedModelError(
            f"config.json: topk_method={method!r} is not supported for DeepseekV2ForCausalLM; "
            "paxkv supports 'greedy' and 'group_limited_greedy'."
        )
    factor = read_number(hf_config, "routed_scaling_factor", 1.0)
    return GroupedSoftmaxTopK(top_k=top_k, factor=factor, **groups)


def _make_sparse_mlp(config: DeepseekV2Config, dtype: jnp.dtype) -> SharedExpertsMLP:
    return SharedExpertsMLP(
        # float32, as in transformers.
        gate=Router(config.hidden_size, config.num_experts, dtype=jnp.dtype("float32")),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
        shared_experts=GatedMLP(
            config.hidden_size,
            config.shared_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
    )
