"""`Panels`: the arrays of a `ScaledKernel`, or some of their groups, rows and columns."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from models.stored_kernels.number_format import (
    MIDDLE,
    NumberFormat,
    as_float32,
    factor_of,
    scales_as_float32,
    split_bytes,
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
        """Computes `(number - zero) * scale` of one panel in float32, and rounds it once."""
        numbers = jnp.concatenate(split_bytes(self.numbers, self.number_format), axis=1)
        values = as_float32(numbers, self.number_format)
        zeros = self._zeros()
        if zeros is not None:
            values -= zeros[:, None]
        values *= factor_of(self.number_format)
        values *= scales_as_float32(self.scales)[:, None]
        return values.astype(dtype).reshape(-1, values.shape[-1])

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
        zeros = self._zeros()
        if zeros is not None:
            sums -= zeros[:, 0] * x.sum(axis=(1, 2))[:, None, None]
        return sums * factor_of(self.number_format) * scales_as_float32(self.scales)[:, 0]

    def _zeros(self) -> jax.Array | None:  # f32, with the axes of scales
        """Zero points; None if the numbers need none."""
        if self.number_format != "int4":
            return None
        if self.zeros is None:
            return jnp.full([1] * self.scales.ndim, MIDDLE, jnp.float32)
        return as_float32(self.zeros, "int4")
