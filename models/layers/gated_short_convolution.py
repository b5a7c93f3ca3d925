"""`GatedShortConvolution`: a convolution between two gates, in place of attention."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerContext
from models.layers.linear import Linear
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution

# The name of the layer's cache of states. Checkpoints also have it in the names of weights.
CONV = "conv"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedShortConvolutionConfig:
    """The sizes of a `GatedShortConvolution`."""

    hidden_size: int
    kernel_size: int
    use_bias: bool  # of the convolution and of both projections

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs."""
        return StateFormat(shapes=((self.kernel_size - 1, self.hidden_size),), num_windows=1)


class GatedShortConvolution(nnx.Module):
    """A `SelfAttention` that computes `c * convolution(b * x)`; its cache is a state.

    Source: arXiv:2511.23404.
    """

    def __init__(self, config: GatedShortConvolutionConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        hidden_size, use_bias = config.hidden_size, config.use_bias
        self.in_proj = Linear(
            hidden_size, 3 * hidden_size, axes=(None, "heads"), use_bias=use_bias, dtype=dtype
        )
        self.conv = ShortConvolution(
            hidden_size, config.kernel_size, use_bias=use_bias, has_silu=False, dtype=dtype
        )
        self.out_proj = Linear(
            hidden_size, hidden_size, axes=("heads", None), use_bias=use_bias, dtype=dtype
        )

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:
        """Returns the input of `project_out`, f[num_queries, hidden], and the pages."""

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
            projected = self.in_proj(norm(hidden), context)
            # The state is whole on each device of a mesh.
            b, c, x = jnp.split(context.kernels.split_last(projected, None), 3, axis=1)
            return b * x, c

        inputs, c = context.by_token(project, hidden)
        state = context.state(CONV)
        (window,) = context.read_state(state, pages)
        y, window = self.conv(inputs, window, state, context)
        pages = context.write_state(state, pages, (window,))
        return context.kept(c * y.astype(c.dtype)), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, hidden]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.out_proj(attended, context)
