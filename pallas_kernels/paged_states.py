"""`PagedStates`: where the states of requests lie in the pages of a cache.

Ops that advance states by one token per request take a `PagedStates` instead of an array, so that
their kernels read and write each state once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    is_wide_float,
    require_int32,
    require_scalar,
    require_shape,
)
from pallas_kernels.cache_layout import check_pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedStates:
    """One state for each request, all of one shape.

    A state is in the slot of its request, which has one or more pages. The numbers of the state lie
    one after the other in these pages, from the start of the first page. If there is only one page,
    they may start later, at `first_number`. After a step, the rest of the last page is undefined.

    Args:
        pages: The words of pages. A GPU reads them as numbers of another dtype without a copy.
        read_blocks: The pages of the states before the step, in `[0, num_blocks)`.
        write_blocks: The pages of the states after the step. No two requests write the same page,
            and no request reads a page that another one writes. A request with entries of
            `num_blocks` or more writes nothing.
        starts_from_zero: The state before the step is zero, whatever `read_blocks` hold.
        dtype: Of the numbers in the pages. Ops compute in float32.
        first_number: How many numbers of `dtype` lie before the state in its page.
    """

    pages: jax.Array  # [num_rows, num_blocks, num_words]
    row: jax.Array | int  # i32[], of the pages
    read_blocks: jax.Array  # i32[num_reqs, pages_per_state]
    write_blocks: jax.Array  # i32[num_reqs, pages_per_state]
    starts_from_zero: jax.Array  # bool[num_reqs]
    dtype: str = field(metadata={"static": True})
    first_number: int = field(default=0, metadata={"static": True})

    @property
    def num_reqs(self) -> int:
        return self.read_blocks.shape[0]

    @property
    def numbers_per_page(self) -> int:
        return self.pages.shape[2] * self.pages.dtype.itemsize // jnp.dtype(self.dtype).itemsize

    @property
    def is_written(self) -> jax.Array:  # bool[num_reqs]
        return self.write_blocks[:, 0] < self.pages.shape[1]

    def check(self, op_name: str, num_reqs: int, shape: tuple[int, ...]) -> None:
        """Checks that states of this shape fit their pages.

        Raises:
            ValueError: A shape or a dtype does not fit.
        """
        check_pages(op_name, self.pages)
        require_shape(op_name, "pages", self.pages, ("num_rows", "num_blocks", "num_words"))
        require_shape(op_name, "read_blocks", self.read_blocks, (num_reqs, "pages_per_state"))
        require_shape(op_name, "write_blocks", self.write_blocks, self.read_blocks.shape)
        require_shape(op_name, "starts_from_zero", self.starts_from_zero, (num_reqs,))
        require_int32(op_name, read_blocks=self.read_blocks, write_blocks=self.write_blocks)
        if not isinstance(self.row, int):
            require_scalar(op_name, "row", self.row)
        if self.starts_from_zero.dtype != jnp.bool_:
            raise ValueError(
                f"{op_name}: starts_from_zero has the wrong dtype: got "
                f"{self.starts_from_zero.dtype}, wanted bool."
            )
        if not is_wide_float(jnp.dtype(self.dtype)):
            raise ValueError(
                f"{op_name}: states have the wrong dtype: got {self.dtype}, wanted a float of 16 "
                "bits or more."
            )
        num_pages, size = self.read_blocks.shape[1], self.first_number + math.prod(shape)
        if size > num_pages * self.numbers_per_page or (self.first_number and num_pages > 1):
            raise ValueError(
                f"{op_name}: states of {self.dtype}{list(shape)} do not fit their pages: got "
                f"{num_pages} pages of {self.numbers_per_page} numbers, and {self.first_number} "
                "numbers before the state, which are only allowed in a single page."
            )

    def check_one_token_each(self, op_name: str, has_one_token_each: bool) -> None:
        """Checks that a step has at most one token of each request.

        Raises:
            ValueError: It may have more.
        """
        if not has_one_token_each:
            raise ValueError(
                f"{op_name}: states in pages can only be advanced by one token of each request; "
                "pass arrays of states, or has_one_token_each=True."
            )

    @property
    def numbers(self) -> jax.Array:  # dtype[num_rows, num_blocks, numbers_per_page]
        """The bits of the pages as numbers of the states. On a GPU, no copy."""
        return _recast(self.pages, jnp.dtype(self.dtype))

    def with_numbers(
        self,
        numbers: jax.Array,  # dtype[num_rows, num_blocks, numbers_per_page]
    ) -> "PagedStates":
        """The inverse of `numbers`."""
        return replace(self, pages=_recast(numbers, self.pages.dtype))

    def read(self, shape: tuple[int, ...]) -> jax.Array:  # f32[num_reqs, *shape]
        """The states before the step, by plain XLA."""
        size = math.prod(shape)
        width = self._width(size)
        place = self.numbers.at[self.row, self.read_blocks, self.first_number : width]
        found = place.get(mode="promise_in_bounds", wrap_negative_indices=False)
        # Without the barrier, XLA on a GPU may fuse this read with the write of the new states. A
        # kernel that reads some pages and writes others would need a copy of all pages.
        found = jax.lax.optimization_barrier(found)
        found = found.reshape(self.num_reqs, -1)[:, :size].reshape(self.num_reqs, *shape)
        # `where` instead of a factor, because memory that was never written may hold NaN.
        is_zero = jnp.expand_dims(self.starts_from_zero, range(1, found.ndim))
        return jnp.where(is_zero, 0, found).astype(jnp.float32)

    def write(
        self,
        states: jax.Array,  # f32[num_reqs, *shape], computed from what `read` returned
    ) -> jax.Array:
        """The pages with the states after the step, by plain XLA."""
        num_pages = self.write_blocks.shape[1]
        flat = states.reshape(self.num_reqs, -1).astype(self.dtype)
        width = self._width(flat.shape[1])
        num_numbers = num_pages * (width - self.first_number)
        flat = jnp.pad(flat, ((0, 0), (0, num_numbers - flat.shape[1])))
        place = self.numbers.at[self.row, self.write_blocks, self.first_number : width]
        numbers = place.set(
            flat.reshape(self.num_reqs, num_pages, -1), mode="drop", wrap_negative_indices=False
        )
        return self.with_numbers(numbers).pages

    def advance_one_by_one(
        self,
        step: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
        shape: tuple[int, ...],
        out: jax.Array,  # f32[num_reqs, ...], zeros
    ) -> tuple[jax.Array, jax.Array]:
        """The pages after a step and the results, for reference bodies.

        Args:
            step: Takes the index of a request and its state, f32[*shape]. Returns the new state,
                and the result of the request.
        """
        first, size = self.first_number, math.prod(shape)

        def run_request(
            req: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            numbers, out = carry
            slot = numbers[self.row, self.read_blocks[req]].reshape(-1)
            state = slot[first : first + size].reshape(shape).astype(jnp.float32)
            state, result = step(req, jnp.where(self.starts_from_zero[req], 0, state))
            place = numbers.at[self.row, self.write_blocks[req]]
            old = place.get(mode="clip")
            flat = old.reshape(-1).at[first : first + size].set(state.reshape(-1).astype(old.dtype))
            return place.set(flat.reshape(old.shape), mode="drop"), out.at[req].set(result)

        carry = (self.numbers, out)
        numbers, out = jax.lax.fori_loop(0, self.num_reqs, run_request, carry)
        return self.with_numbers(numbers).pages, out

    def _width(self, size: int) -> int:
        """The end of the numbers of a page that are read or written."""
        is_single = self.read_blocks.shape[1] == 1
        return self.first_number + size if is_single else self.numbers_per_page


def _recast(numbers: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The bits of `[num_rows, num_blocks, n]` as numbers of another dtype, wider or narrower."""
    ratio = dtype.itemsize // numbers.dtype.itemsize
    if ratio > 1:
        numbers = numbers.reshape(*numbers.shape[:2], -1, ratio)
    if dtype != numbers.dtype:
        numbers = jax.lax.bitcast_convert_type(numbers, dtype)
    return numbers.reshape(*numbers.shape[:2], -1)
