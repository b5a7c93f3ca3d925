"""Runs work on some rows of a step: on the leading ones that hold tokens, or on a chunk."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True, slots=True)
class Width:
    """A static number of leading rows, and the loop index of the loop around the work on them.

    Args:
        turn: None: there is no loop around the work.
    """

    size: int
    turn: jax.Array | None = None  # i32[], 0

    def read(self, rows: jax.Array) -> jax.Array:
        """The first `size` rows.

        XLA moves work out of a loop if its inputs do not change in the loop. It would then do the
        work of every width. The barrier hides from XLA that the rows are the same in every turn.
        """
        if self.turn is not None:
            rows, _ = jax.lax.optimization_barrier((rows, self.turn))
        return rows[: self.size]

    def write(self, rows: jax.Array, leading: jax.Array) -> jax.Array:
        """`rows`, with its first rows replaced by `leading`."""
        if leading.shape == rows.shape:
            return leading
        return jax.lax.dynamic_update_slice_in_dim(rows, leading, 0, axis=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`size` rows from row `start` on. Rows past the end of an array are zero."""

    start: jax.Array  # i32[]
    size: int

    def read(self, rows: jax.Array) -> jax.Array:
        # A slice that reaches past the end would start earlier. No copy if the chunks fit.
        missing = -rows.shape[0] % self.size
        rows = jnp.pad(rows, ((0, missing), *[(0, 0)] * (rows.ndim - 1)))
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.size, axis=0)

    def write(self, rows: jax.Array, own: jax.Array) -> jax.Array:
        """`rows`, with the chunk's rows replaced by `own`."""
        return jax.lax.dynamic_update_slice_in_dim(rows, own, self.start, axis=0)


def run_at_width(
    widths: tuple[int, ...],
    num_used: jax.Array,  # i32[]
    body: Callable[[Width, Carry], Carry],
    carry: Carry,
    *,
    is_wanted: jax.Array | None = None,  # bool[]
) -> Carry:
    """Returns `body(width, carry)` with the smallest of `widths` that is at least `num_used`.

    One program then serves several numbers of rows without always computing the largest, and code
    that does not depend on this number is compiled once. Each width is a loop of one turn or none.
    A switch would copy its arguments and results, but a loop's carry stays in place.

    Args:
        widths: Rising; the last one is at least `num_used`.
        is_wanted: If false, the result is `carry`, unchanged. None means true.
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
