"""Parts of families that choose experts by a softmax of the router's scores."""

from dataclasses import dataclass

import jax.numpy as jnp

from models.config.moe_config import MoEConfig
from models.layers.experts import make_experts
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxMoEConfig(MoEConfig):
    """The config of a decoder with a `SoftmaxTopK`."""

    normalizes_weights: bool  # whether the weights of the chosen experts are scaled to a sum of 1


def softmax_parts(config: SoftmaxMoEConfig, dtype: jnp.dtype) -> dict[str, object]:
    """The arguments of `SparseMLP` for one layer."""
    return {
        "gate": Router(config.hidden_size, config.num_experts, dtype=dtype),
        "choose": SoftmaxTopK(
            top_k=config.num_experts_per_tok, normalizes=config.normalizes_weights
        ),
        "experts": make_experts(config, dtype=dtype),
    }


def make_softmax_experts(config: SoftmaxMoEConfig, dtype: jnp.dtype) -> SparseMLP:
    """Makes the experts of one layer."""
    return SparseMLP(**softmax_parts(config, dtype))
