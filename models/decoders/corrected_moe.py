"""Parts of families with shared experts and a router that has corrections, as DeepSeek-V3."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.layers.routing import CorrectedRouter, Routing
from models.layers.sparse_mlp import SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedMoEConfig(SharedMoEConfig):
    """The config of a decoder with a `CorrectedRouter` and shared experts."""

    choose: Callable[..., Routing]  # see `SparseMLP`


def make_corrected_experts(config: CorrectedMoEConfig, *, dtype: jnp.dtype) -> SparseMLP:
    """Makes the experts of one layer."""
    gate = CorrectedRouter(config.hidden_size, config.num_experts)
    return make_shared_experts(config, gate=gate, choose=config.choose, dtype=dtype)
