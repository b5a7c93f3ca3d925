"""`ShiftedFactors` and `ScaledSum`: a trained bias and scale for each feature."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.weight_rule import Source, WeightRule


class ShiftedFactors(nnx.Module):
    """`(x + bias) * scale`, with a bias and a scale for each feature, in x's dtype."""

    def __init__(self, num_features: int, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.bias = nnx.Param(jnp.zeros((num_features,), dtype))
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. Both names begin with the layer's name."""
        shape = self.scale.get_value().shape
        return {
            leaf: WeightRule(
                sources=(Source(name=f"{name}_{leaf}", shape=shape),), layout="vector", axes=(None,)
            )
            for leaf in ("bias", "scale")
        }

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, num_features]
    ) -> jax.Array:  # f[num_rows, num_features]
        return (x + self.bias[...].astype(x.dtype)) * self.scale[...].astype(x.dtype)


class ScaledSum(nnx.Module):
    """The sum of an output and the residual stream, after a `ShiftedFactors` of each."""

    def __init__(self, num_features: int, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.hidden_states = ShiftedFactors(num_features, dtype=dtype)
        self.residual = ShiftedFactors(num_features, dtype=dtype)

    def __call__(
        self,
        stream: jax.Array,  # f32[num_rows, num_features]
        out: jax.Array,  # f[num_rows, num_features]
    ) -> jax.Array:  # f32[num_rows, num_features]
        return self.residual(stream) + self.hidden_states(out)
