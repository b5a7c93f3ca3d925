"""`ZeroExpertsMLP`: experts of which some return their input and need no weights."""

import jax
import jax.numpy as jnp

from models.forward.layer_context import LayerContext
from models.layers.routing import Routing
from models.layers.sparse_mlp import SparseMLP


class ZeroExpertsMLP(SparseMLP):
    """Experts, and zero-computation experts: those from `experts.num_experts` on.

    A zero-computation expert returns its input. The router scores all of them, so that a token
    may go through few experts with weights.

    Source: LongCat-Flash, arXiv:2509.01322, section 2.1.
    """

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        expert_ids, weights = self.gate.route(x, self.choose)
        num_experts = self.experts.num_experts
        is_zero = expert_ids >= num_experts
        # Expert `num_experts` does not exist: choices of it are skipped, like choices of padding.
        routing = Routing(jnp.minimum(expert_ids, num_experts), jnp.where(is_zero, 0.0, weights))
        kept = jnp.where(is_zero, weights, 0.0).sum(axis=-1, keepdims=True)
        return self.experts(x, routing, context) + (kept * x.astype(jnp.float32)).astype(x.dtype)
