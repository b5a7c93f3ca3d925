"""Gated MLPs and experts that clip what their activation and their up projection give."""

import jax
import jax.numpy as jnp

from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.mlp import GatedMLP, activate


class ClippedGatedMLP(GatedMLP):
    """`down(min(activation(gate(x)), limit) * clip(up(x), -limit, limit))`.

    Source: StepFun's Step 3.5 Flash.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        limit: float,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation=activation, dtype=dtype)
        self.limit = limit

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        gate, up = self.gate_proj(x, context), self.up_proj(x, context)
        joined = _join_clipped(gate, up, self.activation, self.limit)
        return self.down_proj(joined, context)


class ClippedExperts(Experts):
    """Experts that clip as `ClippedGatedMLP` does."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        limit: float,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(
            num_experts, hidden_size, intermediate_size, activation=activation, dtype=dtype
        )
        self.limit = limit

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:  # f[places, intermediate]
        """See `Experts.join`."""
        return _join_clipped(gate, up, self.activation, self.limit)


def _join_clipped(
    gate: jax.Array, up: jax.Array, activation: Activation, limit: float
) -> jax.Array:  # f[..., intermediate]
    clipped = jnp.minimum(activate(gate, activation), limit)
    return clipped * jnp.clip(up, -limit, limit)
