"""`SparseGateMLP`: a gated MLP that uses the largest numbers of its gate only."""

import statistics

import jax
import jax.numpy as jnp

from models.config.dense_config import Activation
from models.layers.mlp import GatedMLP, activate


class SparseGateMLP(GatedMLP):
    """Subtracts a cutoff from the gate before the activation, and replaces the rest by 0.

    If the gate's numbers are normally distributed, a share of `sparsity` of them is below the
    cutoff.

    Source: arXiv:2506.06644.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        sparsity: float,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the MLP with weights to be filled in.

        Args:
            sparsity: In (0, 1).
        """
        super().__init__(hidden_size, intermediate_size, activation=activation, dtype=dtype)
        # Standard deviations above the mean: 1.645 for a sparsity of 0.95.
        self.cutoff = statistics.NormalDist().inv_cdf(sparsity)

    def _activated(self, gate: jax.Array) -> jax.Array:
        gate_f32 = gate.astype(jnp.float32)
        mean = gate_f32.mean(axis=-1, keepdims=True)
        deviation = gate_f32.std(axis=-1, keepdims=True)
        sparse = jax.nn.relu(gate_f32 - (mean + deviation * self.cutoff))
        return activate(sparse.astype(gate.dtype), self.activation)
