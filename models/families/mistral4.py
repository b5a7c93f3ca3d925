"""Mistral Small 4: latent attention with a factor of queries that grows with their position, and
experts chosen in groups by a softmax.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.config.latent_config import LatentAttentionConfig, read_latent_attention
from models.config.moe_config import read_expert_fields, read_group_fields, read_leading_dense
from models.config.partial_rotary import read_rotary_factor, without_rotary_factor
from models.config.rope_config import with_default_rope
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.errors import UnsupportedModelError
from models.families.ministral3 import read_query_scale
from models.layers.attention_variants import QueryScale
from models.layers.experts import packed_gate_up_rules
from models.layers.latent_attention import LatentAttention
from models.layers.latent_variants import ScaledQueriesLatentAttention
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router
from models.layers.routing_rules import PairGroupedSoftmaxTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"qk_nope_head_dim": 64, "kv_lora_rank": 256, "bos_token_id": 1, "eos_token_id": 2}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral4Config(SharedMoEConfig):
    """The config of Mistral 4."""

    choose: PairGroupedSoftmaxTopK
    query_scale: QueryScale | None


class Mistral4ForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/mistral4."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Mistral4Config:
        hf_config = with_default_rope(with_defaults(hf_config, _DEFAULTS), _DEFAULT_ROPE)
        fields = read_dense_fields(hf_config)
        max_length = fields["max_position_embeddings"]
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=128,
            default_top_k=4,
            default_size=2048,
        )
        attention = read_latent_attention(
            without_rotary_factor(hf_config),
            max_length,
            default_q_latent_dim=1024,
            turns_neighbors=read_flag(hf_config, "rope_interleave", True),
        )
        _check_rope(hf_config, attention)
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return Mistral4Config(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=read_leading_dense(hf_config, fields["num_layers"], default=0),
            choose=_read_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            query_scale=read_query_scale(hf_config, attention.rope, max_length),
        )

    def __init__(self, config: Mistral4Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        attention = functools.partial(LatentAttention, dtype=dtype)
        if config.query_scale is not None:
            attention = functools.partial(
                ScaledQueriesLatentAttention, query_scale=config.query_scale, dtype=dtype
            )
        super().__init__(
            config,
            attention=attention,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        return packed_gate_up_rules(super().weight_rules())


def _check_rope(hf_config: Mapping[str, object], attention: LatentAttentionConfig) -> None:
    if attention.rope.kind != "yarn":
        raise UnsupportedModelError(
            f"config.json: rope type {attention.rope.kind!r} is not supported for "
            "Mistral4ForCausalLM; paxkv supports 'yarn'."
        )
    head_dim, rotary_dim = attention.head_dim, attention.rotary_dim
    factor = read_rotary_factor(hf_config, rotary_dim / head_dim)
    if int(head_dim * factor) != rotary_dim:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor={factor} is not supported for heads of {head_dim} "
            f"dimensions with qk_rope_head_dim={rotary_dim}; paxkv supports "
            f"{rotary_dim / head_dim}."
        )


def _read_choice(
    hf_config: Mapping[str, object], experts: Mapping[str, int]
) -> PairGroupedSoftmaxTopK:
    top_k = experts["num_experts_per_tok"]
    return PairGroupedSoftmaxTopK(
        top_k=top_k,
        normalizes=read_flag(hf_config, "norm_topk_prob", True),
        factor=read_number(hf_config, "routed_scaling_factor", 1.0),
        **read_group_fields(hf_config, num_experts=experts["num_experts"], top_k=top_k),
    )


def _make_sparse_mlp(config: Mistral4Config, dtype: jnp.dtype) -> SparseMLP:
    gate = Router(config.hidden_size, config.num_experts, dtype=dtype)
    return make_shared_experts(config, gate=gate, choose=config.choose, dtype=dtype)
