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
# An array takes a multiple of this, so that it starts at a word of the pages, whatever their dtype.
_WORD_BYTES = 4


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # in memory

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        num_bytes = self.num_numbers * jnp.dtype(self.dtype).itemsize
        return -(-num_bytes // _WORD_BYTES) * _WORD_BYTES


class _Run(NamedTuple):
    """Arrays that lie one after the other, from the start of a page on."""

    arrays: tuple[_Array, ...]
    first_page: int  # of the slot
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """The arrays of a recurrent layer, such as the window of a convolution and a state.

    If a page holds all arrays, they lie in it one after the other. Otherwise each array starts on a
    page of its own, because then no array has to be cut out of a larger one. Layers compute in
    float32, whatever the dtypes in memory.

    Args:
        shapes: Shapes of the arrays of one request.
        num_windows: The first arrays are windows of convolutions; the others are states.
        window_dtype: The dtype of windows in memory.
        state_dtype: The dtype of states in memory.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_windows: int = 0
    window_dtype: str = "float32"
    state_dtype: str = "float32"
    kind: Literal["state"] = "state"

    @property
    def _arrays(self) -> tuple[_Array, ...]:
        return tuple(
            _Array(shape, self.window_dtype if idx < self.num_windows else self.state_dtype)
            for idx, shape in enumerate(self.shapes)
        )

    def on_each_of(self, num_devices: int) -> "StateFormat":
        return self

    def page_bytes(self, block_size: int) -> int:
        return -(-self.content_bytes(block_size) // _PAGE_STEP_BYTES) * _PAGE_STEP_BYTES

    def content_bytes(self, block_size: int) -> int:
        return sum(array.num_bytes for array in self._arrays)

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
    ) -> tuple[jax.Array, ...]:  # f32[num_reqs, *shape] of each array
        """The states before the step. They are zero for requests that start from zero."""
        pages = pages.reshape(*pages.shape[:2], -1)
        word_bytes = pages.dtype.itemsize
        found = []
        for run in self._runs(pages.shape[2] * word_bytes):
            slots = state.read_slots[:, run.first_page : run.first_page + run.num_pages]
            num_words = sum(array.num_bytes for array in run.arrays) // word_bytes
            width = num_words if run.num_pages == 1 else pages.shape[2]
            words = rules.read_prefix(pages, state.row, slots.reshape(-1), width)
            words = words.reshape(slots.shape[0], -1)[:, :num_words]
            ends = itertools.accumulate(array.num_bytes // word_bytes for array in run.arrays)
            parts = jnp.split(words, list(ends)[:-1], axis=1)
            for part, array in zip(parts, run.arrays, strict=True):
                numbers = rules.from_words(part, jnp.dtype(array.dtype))[:, : array.num_numbers]
                # Selected, because memory that was never written may hold NaN.
                numbers = jnp.where(state.starts_from_zero[:, None], 0, numbers)
                found.append(numbers.astype(jnp.float32).reshape(-1, *array.shape))
        return tuple(found)

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
            parts = []
            for array in run.arrays:
                numbers = next(rest)
                numbers = numbers.reshape(numbers.shape[0], -1).astype(array.dtype)
                for other in arrays:
                    numbers = rules.after(numbers, other)
                num_stored = array.num_bytes // numbers.dtype.itemsize
                numbers = jnp.pad(numbers, ((0, 0), (0, num_stored - numbers.shape[1])))
                parts.append(rules.as_words(numbers, stored))
            words = jnp.concatenate(parts, axis=1)
            slots = state.write_slots[:, run.first_page : run.first_page + run.num_pages]
            if run.num_pages > 1:
                words = jnp.pad(words, ((0, 0), (0, run.num_pages * num_words - words.shape[1])))
                words = words.reshape(-1, num_words)
            block_ids = jnp.where(is_written, slots, num_blocks).reshape(-1)
            stored = rules.write_prefix(stored, state.row, block_ids, words)
        return stored.reshape(pages.shape)

    def _runs(self, page_bytes: int) -> Iterator[_Run]:
        if self.content_bytes(1) <= page_bytes:
            yield _Run(self._arrays, first_page=0, num_pages=1)
            return
        first_page = 0
        for array in self._arrays:
            num_pages = -(-array.num_bytes // page_bytes)
            yield _Run((array,), first_page, num_pages)
            first_page += num_pages
