"""Token-by-token work on as many leading rows as a step has, in one of a few static widths."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True, slots=True)
class Width:
    """One number of leading rows, and the turn of the loop around the work on them, if any."""

    size: int
    turn: jax.Array | None = None  # i32[], 0

    def read(self, rows: jax.Array) -> jax.Array:
        """The first `size` of the rows.

        Work on what does not change in the loop would be done before it, and so for every width:
        the compiler must not see that rows are the same in every turn.
        """
        if self.turn is not None:
            rows, _ = jax.lax.optimization_barrier((rows, self.turn))
        return rows[: self.size]

    def write(self, rows: jax.Array, leading: jax.Array) -> jax.Array:
        """`rows` with the first ones replaced by all of `leading`."""
        if leading.shape == rows.shape:
            return leading
        return jax.lax.dynamic_update_slice_in_dim(rows, leading, 0, axis=0)


def run_at_width(
    widths: tuple[int, ...],
    num_used: jax.Array,  # i32[]
    body: Callable[[Width, Carry], Carry],
    carry: Carry,
    *,
    is_wanted: jax.Array | None = None,  # bool[]
) -> Carry:
    """`body(width, carry)` with the least of the rising `widths` that holds `num_used`.

    So one program serves several numbers of rows without computing the largest every time, and
    what does not depend on their number is compiled once. Loops of one turn or none take the place
    of a switch, whose arguments and results would be copied: a loop's carry stays where it is.

    Where the work is not wanted, `carry` comes back as it is; None is always. `num_used` is never
    more than the last width.
    """
    if len(widths) == 1 and is_wanted is None:
        return body(Width(widths[0]), carry)
    for idx, size in enumerate(widths):
        is_chosen = num_used <= size
        if idx > 0:
            is_chosen &= num_used > widths[idx - 1]
        if is_wanted is not None:
            is_chosen &= is_wanted

        def run(turn: jax.Array, carry: Carry, size: int = size) -> Carry:
            return body(Width(size, turn), carry)

        carry = jax.lax.fori_loop(0, is_chosen.astype(jnp.int32), run, carry)
    return carry
