"""`Panels`: the arrays of a `ScaledKernel`, or some of their groups, rows and columns."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.number_format import (
    NumberFormat,
    as_float32,
    factor_of,
    scales_as_float32,
    split_bytes,
    widen_groups,
    zeros_as_float32,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Panels:
    """Numbers with scales. `ScaledKernel` describes the arrays."""

    numbers: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    number_format: NumberFormat = field(metadata={"static": True})

    def widen(self, dtype: jnp.dtype) -> jax.Array:  # dtype[in_features, width]
        """The numbers of one panel as floats, each rounded once."""
        return widen_groups(self.numbers, self.scales, self.zeros, self.number_format, dtype)

    def multiply_rows(
        self,
        x: jax.Array,  # f32[num_x_rows, numbers_per_byte, num_rows]
    ) -> jax.Array:  # f32[num_x_rows, num_panels, width]
        """The products of some rows of one group, summed.

        XLA fuses all operations, so that no widened number is in memory.
        """
        sums = 0.0
        for row in range(x.shape[2]):
            parts = split_bytes(self.numbers[:, 0, row], self.number_format)
            for place, part in enumerate(parts):
                sums += as_float32(part, self.number_format) * x[:, place, row, None, None]
        zeros = zeros_as_float32(self.zeros, self.number_format, num_axes=self.scales.ndim)
        if zeros is not None:
            sums -= zeros[:, 0] * x.sum(axis=(1, 2))[:, None, None]
        return sums * factor_of(self.number_format) * scales_as_float32(self.scales)[:, 0]
