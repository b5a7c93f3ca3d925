"""Multiplies with the kernel of a parameter, also where a loop over layers chooses it."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax

from models.forward.kernel_settings import ExpertSplit, KernelSettings
from models.layers.chosen_kernel import ChosenKernel, with_kernel
from models.stored_kernels.plain import PlainKernel
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from pallas_kernels import GroupTiles

Result = TypeVar("Result")
# The value of a parameter with the kernel of a product. An array stands for a `PlainKernel`.
KernelValue = jax.Array | StoredKernel


def as_stored_kernel(value: KernelValue) -> StoredKernel:
    """The kernel of a parameter."""
    return value if isinstance(value, StoredKernel) else PlainKernel(value)


def multiply(
    x: jax.Array,  # f[num_rows, in_features]
    kernel: KernelValue | ChosenKernel,
    settings: KernelSettings,
) -> jax.Array:  # f32[num_rows, out_features]
    """`x @ kernel`."""
    first, use = _first_and_use(kernel)
    return first.multiply(x, settings, use)


def multiply_groups(
    x: jax.Array,  # f[num_tiles * tile_rows, in_features]
    kernel: KernelValue | ChosenKernel,
    tiles: GroupTiles,
    settings: KernelSettings,
    *,
    split: ExpertSplit,
) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
    """See `StoredKernel.multiply_groups`."""
    first, use = _first_and_use(kernel)
    return first.multiply_groups(x, tiles, settings, use, split=split)


def _first_and_use(kernel: KernelValue | ChosenKernel) -> tuple[StoredKernel, UseKernel]:
    first = kernel.kernels[0] if isinstance(kernel, ChosenKernel) else kernel
    return as_stored_kernel(first), functools.partial(_use, kernel)


def _use(
    kernel: KernelValue | ChosenKernel,
    function: Callable[[jax.Array, StoredKernel], Result],
    operand: jax.Array,
) -> Result:
    return with_kernel(
        lambda operand, value: function(operand, as_stored_kernel(value)), operand, kernel
    )
