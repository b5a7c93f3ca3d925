"""Parts of families with DeepSeek-V3's experts: a router with corrections, and shared experts."""

from dataclasses import dataclass

import jax.numpy as jnp

from models.layers.experts import make_experts
from models.layers.mlp import GatedMLP
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SharedExpertsMLP
from models.moe_config import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedMoEConfig(MoEConfig):
    """The config of a decoder with a `CorrectedRouter` and shared experts."""

    choose: SigmoidTopK
    shared_intermediate_size: int  # inner width of all shared experts together


def make_corrected_experts(config: CorrectedMoEConfig, *, dtype: jnp.dtype) -> SharedExpertsMLP:
    """Makes the experts of one layer."""
    return SharedExpertsMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
        shared_experts=GatedMLP(
            config.hidden_size,
            config.shared_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
    )
