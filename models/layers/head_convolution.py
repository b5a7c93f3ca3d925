"""`HeadConvolution`: a causal convolution that mixes the channels of each head."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.forward.layer_context import LayerContext, LayerState
from models.layers.head_linear import HeadLinear
from models.weight_rule import Source, WeightRule


class HeadConvolution(HeadLinear):
    """Multiplies each of a head's last `kernel_size` inputs by its own matrix, and adds a bias.

    The products are summed, so this is one `HeadLinear` of the joined inputs, oldest first.
    """

    def __init__(
        self, num_heads: int, head_dim: int, kernel_size: int, *, dtype: jnp.dtype
    ) -> None:
        """Makes the layer with weights to be filled in."""
        super().__init__(num_heads, kernel_size * head_dim, head_dim, dtype=dtype)
        self.num_heads = num_heads
        self.bias = nnx.Param(jnp.zeros((num_heads * head_dim,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. Checkpoints store [num_heads * out, in, kernel_size]."""
        num_heads, joined, head_dim = self.kernel.get_value().shape
        num_channels = num_heads * head_dim
        stored = (num_channels, head_dim, joined // head_dim)

        def join(weights_np: Sequence[np.ndarray]) -> np.ndarray:
            by_head_np = weights_np[0].swapaxes(1, 2).reshape(num_heads, head_dim, joined)
            return np.ascontiguousarray(by_head_np)

        weight = Source(name=f"{name}.weight", shape=stored)
        bias = Source(name=f"{name}.bias", shape=(num_channels,))
        return {
            "kernel": WeightRule(
                sources=(weight,), layout="heads", axes=(None, None, None), combine=join
            ),
            "bias": WeightRule(sources=(bias,), layout="vector", axes=(None,)),
        }

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, kernel_size, num_heads * head_dim]: the last inputs of each row
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, num_heads, head_dim]
        by_place = x.reshape(*x.shape[:2], self.num_heads, -1)
        joined = by_place.swapaxes(1, 2).reshape(x.shape[0], self.num_heads, -1)
        return super().__call__(joined, context) + self.bias[...].reshape(self.num_heads, -1)


def last_inputs(
    x: jax.Array,  # f[num_tokens, num_channels]
    window: jax.Array,  # f32[num_reqs, kernel_size - 1, num_channels]
    state: LayerState,
    context: LayerContext,
) -> tuple[jax.Array, jax.Array]:
    """For each token, the last `kernel_size` inputs of its request up to it, oldest first.

    Returns f[num_tokens, kernel_size, num_channels], and the windows after the step.
    """
    num_kept = window.shape[1]
    found = []
    for place in range(num_kept):
        # A convolution whose kernel is 1 at one place and 0 elsewhere.
        is_place = jnp.arange(num_kept + 1) == place
        kernel = jnp.broadcast_to(is_place[:, None], (num_kept + 1, x.shape[1]))
        moved, new_window = pallas_kernels.causal_conv1d(
            *(x, window, kernel.astype(x.dtype), state.query_start_loc),
            state_ends=state.state_ends,
            target=context.kernels.target,
        )
        found.append(moved.astype(x.dtype))
    return jnp.stack([*found, x], axis=1), new_window
