"""`ChosenKernel`: in a loop over layers, the kernel of the layer that the loop has reached."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# f[in_features, out_features], or panels of its columns.
Kernel = jax.Array | tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """Stands for the kernel, or another large parameter, of layer `layer_idx` in a loop."""

    layer_idx: jax.Array  # i32[], in [0, len(kernels))
    kernels: tuple[Kernel, ...]  # of equal shapes and dtypes


def dtype_of(kernel: Kernel | ChosenKernel) -> jnp.dtype:
    """The dtype of a kernel: that of each of its panels, or of each kernel of a `ChosenKernel`."""
    if isinstance(kernel, ChosenKernel):
        kernel = kernel.kernels[0]
    return kernel[0].dtype if isinstance(kernel, tuple) else kernel.dtype


def with_kernel(
    multiply: Callable[[jax.Array, Kernel], list[jax.Array]],
    x: jax.Array,
    kernel: Kernel | ChosenKernel,
) -> list[jax.Array]:
    """Returns `multiply(x, kernel)`, and copies no kernel.

    For a `ChosenKernel`, a switch has one branch per layer, and each branch contains only the
    product with the kernel of its layer. XLA:CPU compiles most products to library calls, which
    takes almost no time. It would compile anything fused with a product again for every branch.
    """
    if not isinstance(kernel, ChosenKernel):
        return multiply(x, kernel)
    branches = [lambda x, of_layer=of_layer: multiply(x, of_layer) for of_layer in kernel.kernels]
    return jax.lax.switch(kernel.layer_idx, branches, x)
