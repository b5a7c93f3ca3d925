"""`NarrowSparseMLP`: experts that read and write fewer features than the hidden size."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.linear import Linear
from models.layers.routing import CorrectedRouter, Routing, SigmoidTopK
from models.layers.sparse_mlp import SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSigmoidTopK(SigmoidTopK):
    """`SigmoidTopK` of scores that are first multiplied by a number."""

    score_scale: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        bias: jax.Array,  # f32[num_experts]
    ) -> Routing:
        return SigmoidTopK.__call__(self, scores * self.score_scale, bias)


class NormedExperts(Experts):
    """Experts whose outputs are normed before they are multiplied by their weights."""

    adds_parts = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        norm: nnx.Module,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the experts; the other arguments are as in `Experts`.

        Args:
            norm: Norm of an output. All experts share it.
        """
        super().__init__(
            num_experts, hidden_size, intermediate_size, activation=activation, dtype=dtype
        )
        self.post_expert_norm = norm

    def finish(self, down: jax.Array) -> jax.Array:  # f[places, hidden]
        return self.post_expert_norm(down)


class NarrowSparseMLP(SparseMLP):
    """A `SparseMLP` whose experts are between two projections. The router reads the wide input."""

    def __init__(
        self,
        *,
        gate: CorrectedRouter,
        choose: SigmoidTopK,
        pre_expert_proj: Linear,
        pre_expert_norm: nnx.Module,
        experts: Experts,
        post_expert_proj: Linear,
    ) -> None:
        """Makes the block; the other arguments are as in `SparseMLP`.

        Args:
            pre_expert_proj: From the hidden size to the width of the experts.
            pre_expert_norm: Norm of what the experts read.
            post_expert_proj: From the width of the experts to the hidden size.
        """
        super().__init__(gate=gate, choose=choose, experts=experts)
        self.pre_expert_proj = pre_expert_proj
        self.pre_expert_norm = pre_expert_norm
        self.post_expert_proj = post_expert_proj

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        routing = self.gate.route(x, self.choose)
        narrow = self.pre_expert_norm(self.pre_expert_proj(x, context))
        return self.post_expert_proj(self.experts(narrow, routing, context), context)
