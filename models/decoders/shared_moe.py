"""Parts of families with shared experts, which every token goes through."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.moe_config import MoEConfig
from models.layers.experts import make_experts
from models.layers.mlp import GatedMLP
from models.layers.routing import Router, Routing
from models.layers.sparse_mlp import SharedExpertsMLP, SparseMLP


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
