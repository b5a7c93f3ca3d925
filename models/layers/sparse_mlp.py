"""What stands in place of an MLP: a router, its experts, and what some families add to them."""

from collections.abc import Callable

import jax
from flax import nnx

from models.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.routing import Router, Routing


class SparseMLP(nnx.Module):
    """Each row goes through the experts that its scores choose."""

    def __init__(
        self,
        *,
        gate: Router,
        choose: Callable[[jax.Array], Routing],
        experts: Experts,
    ) -> None:
        """Makes the block.

        Args:
            choose: Frozen and hashable, so that layers that choose alike are of one kind.
        """
        self.gate = gate
        self.choose = choose
        self.experts = experts

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return self.experts(x, self.choose(self.gate.scores(x)), context)
