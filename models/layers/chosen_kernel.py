"""The kernel of whichever layer a loop over layers is at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

# f[in_features, out_features], or panels of its columns.
Kernel = jax.Array | tuple[jax.Array, ...]
Product = Callable[[jax.Array, Kernel], list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """In a `Linear`, takes the place of a kernel: that of layer `layer_idx` of several."""

    layer_idx: jax.Array  # i32[], in [0, len(kernels))
    kernels: tuple[Kernel, ...]  # of equal shapes and dtypes


def multiply_each(
    products: Sequence[Product],
    xs: Sequence[jax.Array],
    kernels: Sequence[Kernel] | Sequence[ChosenKernel],
) -> list[list[jax.Array]]:
    """`product(x, kernel)` for each; if the kernels are chosen ones, all of the same layer.

    The products of a layer are all that is in a branch of the switch between the layers: XLA:CPU
    multiplies most by calling a library, which is nothing to compile, while what would be fused
    around them is code of its own for every branch. (So are products of one row, and those in
    loops, `few_rows.py`.) They are in one branch, where a second core may begin with one while the
    first is at another. The weights stay where they are.
    """

    def multiply_by(
        of_layer: Sequence[Kernel],
    ) -> Callable[[Sequence[jax.Array]], list[list[jax.Array]]]:
        return lambda operands: [
            product(x, kernel)
            for product, x, kernel in zip(products, operands, of_layer, strict=True)
        ]

    if not isinstance(kernels[0], ChosenKernel):
        return multiply_by(kernels)(xs)
    by_layer = zip(*(chosen.kernels for chosen in kernels), strict=True)
    return jax.lax.switch(kernels[0].layer_idx, list(map(multiply_by, by_layer)), list(xs))
