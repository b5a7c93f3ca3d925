"""`PagedStateCase`: fields of example inputs of ops that advance states in pages."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_states import PagedStates

_NUM_ROWS, _ROW = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStateCase:
    """Requests of one example, and the pages of their states.

    Args:
        rows: A letter for each request: "w" reads one slot and writes another, "-" writes the slot
            that it reads, "z" starts from zeros and reads a slot of NaN, "." writes nothing.
        page_lines: Lines of `line_size` numbers in a page.
        lines_before: Lines before a state, if its slot has only one page; otherwise 0.
    """

    name: str
    rows: str
    page_lines: int = 16
    lines_before: int = 0
    pages_dtype: str = "float32"
    state_dtype: str = "float32"

    @property
    def state_shape(self) -> tuple[int, ...]:
        raise NotImplementedError(f"{type(self).__name__} must define state_shape")

    @property
    def line_size(self) -> int:
        """The size of the last axis of a state, except in cases that set another size."""
        return self.state_shape[-1]

    def build_states(self, rng: np.random.Generator) -> PagedStates:
        """Slots of random blocks. Pages from which no request reads a state hold NaN."""
        num_lines = self.lines_before + math.prod(self.state_shape) // self.line_size
        num_pages = -(-num_lines // self.page_lines)
        num_reqs = len(self.rows)
        num_blocks = 2 * num_reqs * num_pages + 3
        numbers_np = np.full((_NUM_ROWS, num_blocks, self.page_lines * self.line_size), np.nan)
        blocks = 1 + rng.permutation(num_blocks - 1)[: 2 * num_reqs * num_pages]
        read, write = blocks.reshape(2, num_reqs, num_pages)
        for req, row in enumerate(self.rows):
            if row == "-":
                write[req] = read[req]
            if row == ".":
                write[req] = num_blocks + np.arange(num_pages)
            if row != "z":
                slot_shape = (num_pages, numbers_np.shape[2])
                numbers_np[_ROW, read[req]] = rng.standard_normal(slot_shape)
        states_dtype, pages_dtype = jnp.dtype(self.state_dtype), jnp.dtype(self.pages_dtype)
        pages_np = numbers_np.astype(states_dtype).view(pages_dtype)
        # `jnp.asarray` would compile a program for each dtype and shape.
        return jax.device_put(
            PagedStates(
                pages=pages_np,
                row=np.int32(_ROW),
                read_blocks=read.astype(np.int32),
                write_blocks=write.astype(np.int32),
                starts_from_zero=np.array([row == "z" for row in self.rows]),
                dtype=self.state_dtype,
                first_number=self.lines_before * self.line_size,
            )
        )
