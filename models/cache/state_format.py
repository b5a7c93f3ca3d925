"""`StateFormat`: arrays of fixed size per request, in a slot of one or more pages."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from models.cache import rules
from models.cache.format import Pages
from models.cache.self_test import AttentionRules, SelfTest
from models.forward.layer_context import LayerState

# Every platform can store pages of this many bytes: a TPU stores lines of 128 numbers.
_PAGE_STEP_BYTES = 512


class _Run(NamedTuple):
    """Arrays that lie one after the other, from the start of a page on."""

    shapes: tuple[tuple[int, ...], ...]
    first_page: int  # of the slot
    num_pages: int

    @property
    def num_numbers(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """The arrays of a recurrent layer, such as the window of a convolution and a state.

    If a page holds all arrays, they lie in it one after the other. Otherwise each array starts on a
    page of its own, because then no array has to be cut out of a larger one.

    Args:
        shapes: Shapes of the arrays of one request.
        dtype: Of all arrays.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    kind: Literal["state"] = "state"

    def on_each_of(self, num_devices: int) -> "StateFormat":
        return self

    def page_bytes(self, block_size: int) -> int:
        return -(-self.content_bytes(block_size) // _PAGE_STEP_BYTES) * _PAGE_STEP_BYTES

    def content_bytes(self, block_size: int) -> int:
        return sum(map(math.prod, self.shapes)) * jnp.dtype(self.dtype).itemsize

    def num_pages(self, page_bytes: int) -> int:
        """Pages of a slot."""
        return sum(run.num_pages for run in self._runs(page_bytes))

    def with_width_step(self, step: int) -> "StateFormat":
        return self

    def with_page_bytes(self, page_bytes: int, block_size: int) -> "StateFormat":
        return self

    def self_tests(self, attention: AttentionRules | None, block_size: int) -> tuple[SelfTest, ...]:
        return ()

    def read(
        self, pages: Pages, state: LayerState
    ) -> tuple[jax.Array, ...]:  # [num_reqs, *shape] of each array, of `dtype`
        """The states before the step. They are zero for requests that start from zero."""
        pages = pages.reshape(*pages.shape[:2], -1)
        arrays = []
        for run in self._runs(pages.shape[2] * pages.dtype.itemsize):
            slots = state.read_slots[:, run.first_page : run.first_page + run.num_pages]
            num_words = run.num_numbers * jnp.dtype(self.dtype).itemsize // pages.dtype.itemsize
            width = num_words if run.num_pages == 1 else pages.shape[2]
            words = rules.read_prefix(pages, state.row, slots.reshape(-1), width)
            words = words.reshape(slots.shape[0], -1)[:, :num_words]
            numbers = rules.from_words(words, jnp.dtype(self.dtype))
            # Selected, because memory that was never written may hold NaN.
            numbers = jnp.where(state.starts_from_zero[:, None], 0, numbers)
            ends = itertools.accumulate(map(math.prod, run.shapes))
            parts = jnp.split(numbers, list(ends)[:-1], axis=1)
            arrays += [
                part.reshape(-1, *shape) for part, shape in zip(parts, run.shapes, strict=True)
            ]
        return tuple(arrays)

    def write(
        self,
        pages: Pages,
        state: LayerState,
        arrays: Sequence[jax.Array],  # [num_reqs, *shape] each
    ) -> Pages:
        """The pages with the states after the step. Rows that have none keep theirs.

        Every array must depend on what `read` returned for it (`models/cache/rules.py`).
        """
        stored = pages.reshape(*pages.shape[:2], -1)
        num_blocks, num_words = stored.shape[1:]
        is_written = state.is_written[:, None]
        rest = iter(arrays)
        for run in self._runs(num_words * stored.dtype.itemsize):
            own = [next(rest) for _ in run.shapes]
            numbers = jnp.concatenate([x.reshape(x.shape[0], -1) for x in own], axis=1)
            numbers = numbers.astype(self.dtype)
            for other in arrays:
                numbers = rules.after(numbers, other)
            words = rules.as_words(numbers, stored)
            slots = state.write_slots[:, run.first_page : run.first_page + run.num_pages]
            if run.num_pages > 1:
                words = jnp.pad(words, ((0, 0), (0, run.num_pages * num_words - words.shape[1])))
                words = words.reshape(-1, num_words)
            block_ids = jnp.where(is_written, slots, num_blocks).reshape(-1)
            stored = rules.write_prefix(stored, state.row, block_ids, words)
        return stored.reshape(pages.shape)

    def _runs(self, page_bytes: int) -> Iterator[_Run]:
        if self.content_bytes(1) <= page_bytes:
            yield _Run(self.shapes, first_page=0, num_pages=1)
            return
        first_page = 0
        for shape in self.shapes:
            num_bytes = math.prod(shape) * jnp.dtype(self.dtype).itemsize
            num_pages = -(-num_bytes // page_bytes)
            yield _Run((shape,), first_page, num_pages)
            first_page += num_pages
