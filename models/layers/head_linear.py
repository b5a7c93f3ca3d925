"""`HeadLinear`: a product of each head with a matrix of its own."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.layer_context import LayerContext
from models.layers.chosen_kernel import with_kernel
from models.layers.product import dot_float32


class HeadLinear(nnx.Module):
    """`x[:, h] @ kernel[h]` for each head h, summed in float32 and returned in x's dtype.

    The layer that has it makes the weight rule (`layout="heads"`), because checkpoints store the
    matrices as parts of other tensors.

    Attributes:
        name: As in `Linear`. A step feature that changes the output gets rows of joined heads.
    """

    chosen_in_place: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(
        self, num_heads: int, in_features: int, out_features: int, *, dtype: jnp.dtype
    ) -> None:
        """Makes the layer with weights to be filled in."""
        self.name = ""
        self.kernel = nnx.Param(jnp.zeros((num_heads, in_features, out_features), dtype))

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, num_heads, in_features]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, num_heads, out_features]
        sums = with_kernel(_dot_heads, x, self.kernel.get_value())
        num_rows = x.shape[0]
        y = sums.astype(x.dtype).reshape(num_rows, -1)
        y = context.changed_linear(self.name, x.reshape(num_rows, -1), y)
        return y.reshape(sums.shape)


def _dot_heads(
    x: jax.Array,  # f[num_rows, num_heads, in_features]
    kernel: jax.Array,  # f[num_heads, in_features, out_features]
) -> jax.Array:  # f32[num_rows, num_heads, out_features]
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        # As in `models.layers.product.dot_float32`.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.einsum(
            "thi,hio->tho", x, kernel, precision=precision, preferred_element_type=jnp.float32
        )

    if x.dtype != jnp.bfloat16:
        return multiply(x, kernel)
    # XLA:CPU has no product of bfloat16 in the order that `einsum` chooses: a step would fail.
    by_head = jax.vmap(dot_float32, in_axes=(1, 0), out_axes=1)
    return jax.lax.platform_dependent(x, kernel, cpu=by_head, default=multiply)
