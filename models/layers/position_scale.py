"""`PositionScale`: trained factors of heads that grow with the position."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.weight_rule import Source, SplitAxis, WeightRule


class PositionScale(nnx.Module):
    """A factor of each head: `scale * log(position + 1) + bias`."""

    def __init__(self, num_heads: int, *, axis: SplitAxis | None, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            axis: As in `WeightRule.axes`.
        """
        self.scale = nnx.Param(jnp.zeros((num_heads,), dtype))
        self.bias = nnx.Param(jnp.ones((num_heads,), dtype))
        self.axis = axis

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        shape = self.scale.get_value().shape
        return {
            leaf: WeightRule(
                sources=(Source(name=f"{name}.{leaf}", shape=shape),),
                layout="vector",
                axes=(self.axis,),
            )
            for leaf in ("scale", "bias")
        }

    def scaled(
        self,
        heads: jax.Array,  # f[num_rows, num_heads, width]
        positions: jax.Array,  # i32[num_rows]
    ) -> jax.Array:  # f[num_rows, num_heads, width]
        scale, bias = (param[...].astype(jnp.float32) for param in (self.scale, self.bias))
        logs = jnp.log((positions + 1).astype(jnp.float32))
        factors = scale * logs[:, None] + bias
        return (heads.astype(jnp.float32) * factors[..., None]).astype(heads.dtype)
