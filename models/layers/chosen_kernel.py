"""The kernel of the layer that a loop over layers has reached."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# f[in_features, out_features], or panels of its columns.
Kernel = jax.Array | tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """Stands for a kernel, or another large parameter, in a loop: that of layer `layer_idx`."""

    layer_idx: jax.Array  # i32[], in [0, len(kernels))
    kernels: tuple[Kernel, ...]  # of equal shapes and dtypes


def dtype_of(kernel: Kernel | ChosenKernel) -> jnp.dtype:
    """The dtype of a kernel, which all its panels and all kernels of a loop share."""
    if isinstance(kernel, ChosenKernel):
        kernel = kernel.kernels[0]
    return kernel[0].dtype if isinstance(kernel, tuple) else kernel.dtype


def with_kernel(
    multiply: Callable[[jax.Array, Kernel], list[jax.Array]],
    x: jax.Array,
    kernel: Kernel | ChosenKernel,
) -> list[jax.Array]:
    """`multiply(x, kernel)`.

    A chosen kernel is never copied: the product is in the branches of a switch between the layers,
    and nothing else is. For XLA:CPU most products are calls of a library, which take no time to
    compile; whatever was fused around them would be compiled again for each branch.
    """
    if not isinstance(kernel, ChosenKernel):
        return multiply(x, kernel)
    branches = [lambda x, of_layer=of_layer: multiply(x, of_layer) for of_layer in kernel.kernels]
    return jax.lax.switch(kernel.layer_idx, branches, x)
