"""`Factors`: numbers that multiply features."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.weight_rule import Source, WeightRule


class Factors(nnx.Module):
    """Multiplies each feature by a factor that is a parameter."""

    def __init__(self, num_features: int, *, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((num_features,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=name, shape=self.scale.get_value().shape)
        return {"scale": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_features]; any number of features for a single factor
    ) -> jax.Array:  # f[num_tokens, ...]
        return x * self.scale[...]
