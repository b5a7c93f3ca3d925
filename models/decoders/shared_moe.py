"""Parts of families with shared experts, which every token goes through."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.moe_config import MoEConfig
from models.decoders.softmax_moe import SoftmaxMoEConfig, softmax_parts
from models.layers.experts import make_experts
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP
from models.layers.routing import Router, Routing
from models.layers.sparse_mlp import GatedSharedExpertMLP, SharedExpertsMLP, SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMoEConfig(MoEConfig):
    """The config of a decoder with shared experts."""

    shared_intermediate_size: int  # inner width of all shared experts together; 0 if there are none


def make_shared_experts(
    config: SharedMoEConfig,
    *,
    gate: Router,
    choose: Callable[..., Routing],
    mlp: Callable[..., SharedExpertsMLP] = SharedExpertsMLP,
    dtype: jnp.dtype,
) -> SparseMLP:
    """Makes the experts of one layer.

    Args:
        gate: As in `SparseMLP`; so is `choose`.
        mlp: Makes the block if there are shared experts, from the arguments of `SharedExpertsMLP`.
    """
    experts = make_experts(config, dtype=dtype)
    if not config.shared_intermediate_size:
        return SparseMLP(gate=gate, choose=choose, experts=experts)
    shared_experts = GatedMLP(
        config.hidden_size,
        config.shared_intermediate_size,
        activation=config.hidden_act,
        dtype=dtype,
    )
    return mlp(gate=gate, choose=choose, experts=experts, shared_experts=shared_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSharedMoEConfig(SoftmaxMoEConfig):
    """The config of a decoder with one shared expert, whose output a gate scales (Qwen)."""

    shared_expert_intermediate_size: int  # inner width of the shared expert


def make_gated_shared_expert(
    config: GatedSharedMoEConfig, dtype: jnp.dtype
) -> GatedSharedExpertMLP:
    """Makes the experts of one layer."""
    return GatedSharedExpertMLP(
        **softmax_parts(config, dtype),
        shared_expert=GatedMLP(
            config.hidden_size,
            config.shared_expert_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
        shared_expert_gate=Linear(config.hidden_size, 1, dtype=dtype),
    )
