"""Sums of rows in an order that does not depend on the number of rows."""

import jax

# This many columns are left to XLA, whose loop adds so few of them in a fixed order.
_NUM_COLUMNS_LEFT = 8


def sum_of_rows(
    x: jax.Array,  # f[..., num_columns]
) -> jax.Array:  # f[...]
    """`x.sum(axis=-1)`, added in an order that the number of columns alone decides.

    The left half of the columns is added to the right one until few are left. XLA:CPU may sum a row
    in another order if there are more rows, which would break batch invariance.
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
