"""`ResidualConvolution`: a short convolution whose input is added to its output."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.layer_context import LayerContext, LayerState
from models.layers.short_convolution import ShortConvolution


class ResidualConvolution(nnx.Module):
    """`x + convolution(x)`, in float32. The kernel is float32, whatever the model's dtype is."""

    def __init__(self, num_channels: int, kernel_size: int) -> None:
        """Makes the layer with weights to be filled in."""
        self.conv1d = ShortConvolution(
            num_channels, kernel_size, has_silu=False, dtype=jnp.dtype("float32")
        )

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_channels]
        window: jax.Array,  # f32[num_reqs, kernel_size - 1, num_channels]
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns f[num_tokens, num_channels], and the windows after the step."""
        # The windows are whole on each device of a mesh.
        inputs = context.kernels.split_last(x.astype(jnp.float32), None)
        y, window = self.conv1d(inputs, window, state, context)
        return (inputs + y).astype(x.dtype), window
