"""`TrainedRotary`: a rotary embedding whose frequencies have trained factors."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.rope_config import RopeConfig
from models.layers.rotary import rotary_cos_sin
from models.weight_rule import Source, WeightRule


class TrainedRotary(nnx.Module):
    """Multiplies the frequency of each pair of dimensions by `exp(alpha)`.

    The parameter is float32, whatever dtype the other parameters have, as in transformers.
    """

    def __init__(self, rotary_dim: int) -> None:
        self.alpha = nnx.Param(jnp.zeros((rotary_dim // 2,), jnp.float32))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.alpha", shape=self.alpha.get_value().shape)
        return {"alpha": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def cos_sin(
        self,
        positions: jax.Array,  # i32[num_tokens]
        rope: RopeConfig,
        rotary_dim: int,
    ) -> tuple[jax.Array, jax.Array]:  # f32[num_tokens, rotary_dim // 2] each
        """As `rotary_cos_sin`."""
        factors = jnp.exp(self.alpha[...]) if rotary_dim else None
        return rotary_cos_sin(positions, rope, rotary_dim, factors=factors)
