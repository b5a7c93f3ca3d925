"""`Panels`: the arrays of a `ScaledKernel`, or some of their groups, rows and columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# 4 bits hold -8 to 7 as 0 to 15.
MIDDLE = 8


class Panels(NamedTuple):
    """Numbers with scales. `ScaledKernel` describes the arrays."""

    numbers: jax.Array
    scales: jax.Array
    zeros: jax.Array | None

    def widen(self, dtype: jnp.dtype) -> jax.Array:  # dtype[in_features, width]
        """Computes `(number - zero) * scale` of one panel in float32, and rounds it once."""
        numbers, zeros = self.numbers, 0
        if numbers.dtype == jnp.uint8:
            numbers = jnp.concatenate([numbers & 15, numbers >> 4], axis=1)
            zeros = MIDDLE if self.zeros is None else _as_float32(self.zeros)[:, None]
        values = (_as_float32(numbers) - zeros) * self.scales[:, None]
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
            numbers = self.numbers[:, 0, row]
            parts = [numbers]
            if numbers.dtype == jnp.uint8:
                parts = [numbers & 15, numbers >> 4]
            for place, part in enumerate(parts):
                sums += _as_float32(part) * x[:, place, row, None, None]
        if self.numbers.dtype == jnp.uint8:
            zeros = MIDDLE if self.zeros is None else _as_float32(self.zeros[:, 0])
            sums -= zeros * x.sum(axis=(1, 2))[:, None, None]
        return sums * self.scales[:, 0]


def _as_float32(numbers: jax.Array) -> jax.Array:
    # XLA:CPU widens bytes to 32-bit integers first, and has vector instructions for both steps.
    return numbers.astype(jnp.int32).astype(jnp.float32)
