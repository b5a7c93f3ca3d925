"""`BiasedSparseMLP`: experts whose sum has a bias."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.routing import Router, Routing
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import Source, WeightRule


class BiasedSparseMLP(SparseMLP):
    """Adds one bias to the weighted sum of the experts, whichever experts a row goes through."""

    def __init__(
        self,
        hidden_size: int,
        *,
        gate: Router,
        choose: Callable[..., Routing],
        experts: Experts,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the block; `gate`, `choose` and `experts` are as in `SparseMLP`."""
        super().__init__(gate=gate, choose=choose, experts=experts)
        self.bias = nnx.Param(jnp.zeros((hidden_size,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.bias", shape=self.bias.get_value().shape)
        return {"bias": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return super().__call__(x, context) + self.bias[...]
