"""`ShortConvolution`: a causal convolution of each channel, before a recurrence."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.forward.layer_context import LayerContext, LayerState
from models.head_split import HeadSplit
from models.weight_rule import Source, WeightRule


class ShortConvolution(nnx.Module):
    """A convolution of each channel's last `kernel_size` inputs, plus a bias, in float32.

    The kernel is a vector of [kernel_size, num_channels], because the CPU's loop over layers copies
    only vectors (`models/decoders/chosen_layer.py`).
    """

    def __init__(
        self,
        num_channels: int,
        kernel_size: int,
        *,
        use_bias: bool = False,
        has_silu: bool = True,
        heads: HeadSplit | None = None,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            has_silu: Whether SiLU is applied to the results.
            heads: The heads that the channels belong to, if a mesh may split them.
        """
        self.num_channels = num_channels
        self.kernel_size = kernel_size
        self.has_silu = has_silu
        self.heads = heads
        self.kernel = nnx.Param(jnp.zeros((kernel_size * num_channels,), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype)) if use_bias else None

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. Checkpoints store [num_channels, 1, kernel_size].

        The rule of the kernel may get several sources in place of this one, for parts of the
        channels in order.
        """
        shape = (self.num_channels, 1, self.kernel_size)
        weight = Source(name=f"{name}.weight", shape=shape)
        heads = self.heads
        # A device has its channels' weights for the first place, then for the second, and so on.
        by_place = heads and replace(heads, ranges=heads.ranges * self.kernel_size)
        rules = {
            "kernel": WeightRule(
                sources=(weight,),
                layout="vector",
                axes=(None,),
                combine=_by_place,
                heads=by_place,
            )
        }
        if self.bias is not None:
            bias = Source(name=f"{name}.bias", shape=(self.num_channels,))
            rules["bias"] = WeightRule(sources=(bias,), layout="vector", axes=(None,), heads=heads)
        return rules

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_channels]
        window: jax.Array,  # f32[num_reqs, kernel_size - 1, num_channels]
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns f32[num_tokens, num_channels], and the windows after the step."""
        return self.convolve(self.vectors, x, window, state, context)

    @property
    def vectors(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and the bias."""
        return self.kernel[...], None if self.bias is None else self.bias[...]

    def convolve(
        self,
        vectors: tuple[jax.Array, jax.Array | None],
        x: jax.Array,  # f[num_tokens, channels]
        window: jax.Array,  # f32[num_reqs, kernel_size - 1, channels]
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """As `__call__`, with the parts of `vectors` that belong to the channels of x."""
        kernel, bias = vectors
        y, window = pallas_kernels.causal_conv1d(
            *(x, window, kernel.reshape(self.kernel_size, -1), state.query_start_loc),
            state_ends=state.state_ends,
            target=context.kernels.target,
        )
        if bias is not None:
            y += bias.astype(jnp.float32)
        # SiLU as a division: on the CPU, XLA would compute the factors of a product again for each
        # number of a state that the result is added to.
        return y / (1 + jnp.exp(-y)) if self.has_silu else y, window


def _by_place(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate(weights_np)[:, 0].T).reshape(-1)
