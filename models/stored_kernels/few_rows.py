"""Products of one or two rows with the panels of a `ScaledKernel`, without panels of floats."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from models.stored_kernels.panels import Panels
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel

# Every number is widened once per row of x. With more rows, widening a whole panel takes less time.
MAX_FEW_ROWS = 2
# Panels, and rows of stored numbers in each, that one turn of the loop adds (docs/design/cpu.md).
# XLA cuts longer turns into tasks for its threads, which takes longer than such a turn itself.
_PANELS_PER_TURN = 4
_ROWS_PER_TURN = 4


def multiply_few_rows(
    x: jax.Array,  # f32[num_x_rows, in_features]
    panels: Panels,
    use: UseKernel,
    *,
    first_panel: jax.Array | int,
    num_panels: int,
) -> jax.Array:  # f32[num_x_rows, num_panels * width]
    """Adds products of numbers with activations, a few rows of numbers at a time.

    Args:
        panels: Those of any kernel that `use` may choose. Only their sizes are used.
        use: As in `StoredKernel.multiply`. The kernel has the attribute `panels`.
        first_panel: The first of the `num_panels` panels that are multiplied.
    """
    _, num_groups, num_rows, width = panels.numbers.shape
    num_together = min(num_panels, _PANELS_PER_TURN)
    turn_rows = math.gcd(num_rows, _ROWS_PER_TURN)
    turns_per_group = num_rows // turn_rows
    num_turns = num_groups * turns_per_group
    # A byte holds the numbers of one input, or of two inputs with 4 bits.
    inputs = x.reshape(len(x), num_groups, -1, turns_per_group, turn_rows)

    def first_of(part: jax.Array) -> jax.Array:
        # The last panels may be computed twice.
        return jnp.minimum(part * num_together, num_panels - num_together)

    def cut(place: jax.Array, kernel: StoredKernel) -> Panels:
        first, turn = first_panel + first_of(place // num_turns), place % num_turns
        group, row = turn // turns_per_group, turn % turns_per_group * turn_rows

        def of_array(array: jax.Array) -> jax.Array:
            if array.ndim == 3:
                return _slice(array, (first, group, 0), (num_together, 1, width))
            return _slice(array, (first, group, row, 0), (num_together, 1, turn_rows, width))

        return jax.tree.map(of_array, kernel.panels)

    def add_part(part: jax.Array, out: jax.Array) -> jax.Array:
        def add_turn(turn: jax.Array, sums: jax.Array) -> jax.Array:
            group, turn_of_group = turn // turns_per_group, turn % turns_per_group
            sizes = (len(x), 1, inputs.shape[2], 1, turn_rows)
            own = _slice(inputs, (0, group, 0, turn_of_group, 0), sizes)
            return sums + use(cut, part * num_turns + turn).multiply_rows(own[:, 0, :, 0])

        sums = lax.fori_loop(0, num_turns, add_turn, jnp.zeros((len(x), num_together, width)))
        start = first_of(part) * width
        return lax.dynamic_update_slice(
            out, sums.reshape(len(x), -1), (0, start), allow_negative_indices=False
        )

    out = jnp.zeros((len(x), num_panels * width))
    return lax.fori_loop(0, -(-num_panels // num_together), add_part, out)


def _slice(
    array: jax.Array, starts: tuple[jax.Array | int, ...], sizes: tuple[int, ...]
) -> jax.Array:
    return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
