"""`ChosenKernel`: in a loop over layers, the kernel of the layer that the loop has reached."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax

# The value of a parameter: an array, or a `StoredKernel`.
Kernel = TypeVar("Kernel")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """Stands for the kernel, or another large parameter, of layer `layer_idx` in a loop."""

    layer_idx: jax.Array  # i32[], in [0, len(kernels))
    kernels: tuple[Kernel, ...]  # of equal shapes, dtypes and static fields


def with_kernel(
    function: Callable[[jax.Array, Kernel], Result],
    operand: jax.Array,
    kernel: Kernel | ChosenKernel,
) -> Result:
    """Returns `function(operand, kernel)`, and copies no kernel.

    For a `ChosenKernel`, a switch has one branch per layer, and each branch contains only the
    function with the kernel of its layer. XLA:CPU compiles most products to library calls, which
    takes almost no time. It would compile anything fused with a product again for every branch.
    """
    if not isinstance(kernel, ChosenKernel):
        return function(operand, kernel)
    branches = [
        lambda operand, of_layer=of_layer: function(operand, of_layer)
        for of_layer in kernel.kernels
    ]
    return jax.lax.switch(kernel.layer_idx, branches, operand)
