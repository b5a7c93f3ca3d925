"""`RoundedInt8Kernel`: 8-bit integers, multiplied by activations that are rounded to 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from models.forward.kernel_settings import KernelSettings
from models.layers.product import at_least_min_rows
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis, split_spec

INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RoundedInt8Kernel(StoredKernel):
    """Implements `StoredKernel` for one matrix.

    The activations of each token have a scale of their own, so nothing has to be calibrated. Both
    operands are contiguous along the summed axis, which int8 instructions need. With [in, out],
    YNNPACK would reorder the kernel at each call (measured: docs/design/cpu.md).
    """

    numbers: jax.Array  # i8[out_features, in_features]
    scales: jax.Array  # f32[out_features]

    @classmethod
    def of(
        cls,
        values: jax.Array,  # f[in_features, out_features]
    ) -> "RoundedInt8Kernel":
        """Rounds each output's column to 255 steps of its own."""
        return cls(*_round_columns(values))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape[::-1]

    @property
    def product_dtype(self) -> jnp.dtype:
        return self.numbers.dtype

    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        return split_spec(axes[::-1]), split_spec(axes[1:])

    def multiply(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
    ) -> jax.Array:  # f32[num_rows, out_features]
        x_int8, x_scales = round_to_int8(x, axis=1)
        # Outside of the function, XLA can fuse the scaling with what follows.
        sums, scales = use(
            lambda x, kernel: (_dot_int32(x, kernel.numbers), kernel.scales),
            at_least_min_rows(x_int8),
        )
        return sums[: x.shape[0]].astype(jnp.float32) * x_scales[:, None] * scales


def round_to_int8(
    x: jax.Array,  # f[...]
    *,
    axis: int,
) -> tuple[jax.Array, jax.Array]:  # i8[...], f32[... without axis]
    """The nearest of 255 equal steps between the largest number along `axis` and its negative."""
    scale = jnp.abs(x).max(axis=axis).astype(jnp.float32) / INT8_MAX
    step = jnp.expand_dims(jnp.where(scale > 0, scale, 1.0), axis)
    return jnp.round(x.astype(jnp.float32) / step).astype(jnp.int8), scale


@jax.jit
def _round_columns(
    values: jax.Array,  # f[in_features, out_features]
) -> tuple[jax.Array, jax.Array]:  # i8[out_features, in_features], f32[out_features]
    rounded, scales = round_to_int8(values, axis=0)
    return rounded.T, scales


def _dot_int32(
    x: jax.Array,  # i8[num_rows, in_features]
    numbers: jax.Array,  # i8[out_features, in_features]
) -> jax.Array:  # i32[num_rows, out_features]
    return lax.dot_general(
        x,
        numbers,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
