"""Sums of rows in an order that does not depend on the number of rows."""

import jax

# The largest number of columns that XLA sums itself: its loop adds so few in a fixed order.
_NUM_COLUMNS_LEFT = 8


def sum_of_rows(
    x: jax.Array,  # f[..., num_columns]
) -> jax.Array:  # f[...]
    """`x.sum(axis=-1)` in an order of additions that depends only on the number of columns.

    The two halves of the columns are added until few columns are left. The order of XLA:CPU's own
    sum may depend on the number of rows, which would break batch invariance.
    """
    while x.shape[-1] > _NUM_COLUMNS_LEFT and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.sum(axis=-1)


def platform_sum_of_rows(
    x: jax.Array,  # f[..., num_columns]
) -> jax.Array:  # f[...]
    """`sum_of_rows` on the CPU, and `x.sum(axis=-1)` on other platforms."""
    return jax.lax.platform_dependent(x, cpu=sum_of_rows, default=lambda rows: rows.sum(axis=-1))
