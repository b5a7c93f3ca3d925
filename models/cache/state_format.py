"""`StateFormat`: arrays of fixed size per request, in a slot of one or more pages."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from models.cache import rules
from models.cache.format import Pages
from models.cache.self_test import AttentionRules, SelfTest
from models.cache.state_self_test import StateSelfTest, StepOp
from models.forward.layer_context import LayerState
from models.head_split import HeadSplit
from pallas_kernels import PagedStates

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
        heads: For each array, the axis that a mesh splits, and the heads of the axis. Empty: each
            device has the whole arrays.
        step_op: The op that can advance the last array by one token in the pages. The only other
            array may be a window. None: there is no such op.
        is_part: Whether the arrays are those of one device's heads.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_windows: int = 0
    window_dtype: str = "float32"
    state_dtype: str = "float32"
    heads: tuple[tuple[int, HeadSplit], ...] = ()
    step_op: StepOp | None = None
    is_part: bool = False
    kind: Literal["state"] = "state"

    @property
    def _arrays(self) -> tuple[_Array, ...]:
        return tuple(
            _Array(shape, self.window_dtype if idx < self.num_windows else self.state_dtype)
            for idx, shape in enumerate(self.shapes)
        )

    def on_each_of(self, num_devices: int) -> "StateFormat":
        shapes = list(self.shapes)
        for idx, (axis, heads) in enumerate(self.heads):
            own = list(shapes[idx])
            own[axis] = heads.size_on_each_of(num_devices)
            shapes[idx] = tuple(own)
        is_part = self.is_part or any(heads.is_split(num_devices) for _, heads in self.heads)
        return replace(self, shapes=tuple(shapes), heads=(), is_part=is_part)

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
        if self.step_op is None:
            return ()
        return StateSelfTest.all_of(self.step_op, self.shapes[-1], self.state_dtype)

    def of_windows(self) -> "StateFormat":
        """The format of the windows alone, in the pages where this format has them."""
        return replace(self, shapes=self.shapes[: self.num_windows], step_op=None)

    def in_pages(self, pages: Pages, state: LayerState) -> PagedStates:
        """Where the last array of each request lies, for `step_op`."""
        page_bytes = math.prod(pages.shape[2:]) * pages.dtype.itemsize
        *_, run = self._runs(page_bytes)
        *others, array = run.arrays
        end = run.first_page + run.num_pages
        write_blocks = state.write_slots[:, run.first_page : end]
        return PagedStates(
            pages=pages,
            row=state.row,
            read_blocks=state.read_slots[:, run.first_page : end],
            write_blocks=jnp.where(state.is_written[:, None], write_blocks, pages.shape[1]),
            starts_from_zero=state.starts_from_zero,
            dtype=array.dtype,
            first_number=sum(x.num_bytes for x in others) // jnp.dtype(array.dtype).itemsize,
        )

    def read(
        self, pages: Pages, state: LayerState
    ) -> tuple[jax.Array, ...]:  # f32[num_reqs, *shape] of each array
        """The states before the step. They are zero for requests that start from zero."""
        num_reqs = state.read_slots.shape[0]
        word_bytes = pages.dtype.itemsize
        num_lanes = math.prod(pages.shape[3:])
        found = []
        for run in self._runs(math.prod(pages.shape[2:]) * word_bytes):
            slots = state.read_slots[:, run.first_page : run.first_page + run.num_pages]
            num_words = [array.num_bytes // word_bytes for array in run.arrays]
            width = -(-sum(num_words) // num_lanes) if run.num_pages == 1 else pages.shape[2]
            words = rules.read_prefix(pages, state.row, slots.reshape(-1), width)
            if state.fuses_writes:
                # A kernel that reads some pages and writes others would need a copy of all pages.
                words = jax.lax.optimization_barrier(words)
            lanes = _common_lanes(run, pages)
            words = words.reshape(num_reqs, -1, *lanes)
            start = 0
            for array, num in zip(run.arrays, num_words, strict=True):
                end = start + num // math.prod(lanes)
                numbers = rules.recast(words[:, start:end], array.dtype)
                numbers = numbers[:, : -(-array.num_numbers // math.prod(lanes))]
                numbers = numbers.reshape(num_reqs, *array.shape)
                # `where` instead of a factor, because memory that was never written may hold NaN.
                is_zero = jnp.expand_dims(state.starts_from_zero, range(1, numbers.ndim))
                found.append(jnp.where(is_zero, 0, numbers).astype(jnp.float32))
                start = end
        return tuple(found)

    def write(
        self,
        pages: Pages,
        state: LayerState,
        arrays: Sequence[jax.Array],  # [num_reqs, *shape] each
    ) -> Pages:
        """The pages with the states after the step. Rows that are not `is_written` write nothing.

        Every array must depend on what `read` returned for it (`models/cache/rules.py`).
        """
        stored_dtype, num_blocks = pages.dtype, pages.shape[1]
        runs = tuple(self._runs(math.prod(pages.shape[2:]) * stored_dtype.itemsize))
        dtypes = [_written_dtype(run, stored_dtype, state) for run in runs]
        rest = iter(arrays)
        words_of_runs = [
            _words_of(
                run, list(itertools.islice(rest, len(run.arrays))), rules.view_as(pages, dtype)
            )
            for run, dtype in zip(runs, dtypes, strict=True)
        ]
        # Lines are written as parts of the numbers. XLA would store the numbers for `after` alone.
        is_lines = pages.ndim > 3
        computed = itertools.chain(*words_of_runs) if is_lines else arrays
        block_ids = jnp.where(state.is_written[:, None], state.write_slots, num_blocks)
        # `after` gets the ids: on the CPU, it would be one more pass over the numbers.
        for array in computed:
            block_ids = rules.after(block_ids, array)
        for run, dtype, all_words in zip(runs, dtypes, words_of_runs, strict=True):
            pages = rules.view_as(pages, dtype)
            start = run.first_page
            for words in all_words:
                end = start + words.shape[1]
                ids, lines = block_ids[:, start:end], words.reshape(-1, *words.shape[2:])
                pages = rules.write_prefix(pages, state.row, ids.reshape(-1), lines)
                start = end
        return rules.view_as(pages, stored_dtype)

    def _runs(self, page_bytes: int) -> Iterator[_Run]:
        if self.content_bytes(1) <= page_bytes:
            if self._arrays:
                yield _Run(self._arrays, first_page=0, num_pages=1)
            return
        first_page = 0
        for array in self._arrays:
            num_pages = -(-array.num_bytes // page_bytes)
            yield _Run((array,), first_page, num_pages)
            first_page += num_pages


def _words_of(
    run: _Run,
    arrays: Sequence[jax.Array],  # [num_reqs, *shape] each
    pages: Pages,
) -> list[jax.Array]:  # [num_reqs, num_pages, ...] each
    """The words of a run's pages. Of a single page, they may be only the first ones."""
    page, lanes = pages.shape[2:], _common_lanes(run, pages)
    parts = []
    for array, numbers in zip(run.arrays, arrays, strict=True):
        numbers = numbers.reshape(numbers.shape[0], -1, *lanes).astype(array.dtype)
        num_stored = array.num_bytes // (math.prod(lanes) * numbers.dtype.itemsize)
        parts += rules.parts_of(_padded(numbers, num_stored), pages.dtype)
    num_lines = math.prod(page) // math.prod(lanes)
    # Parts that fill whole pages are written one by one. To join them, a TPU would store them.
    if run.num_pages == 1 or any(part.shape[1] % num_lines for part in parts):
        parts = [jnp.concatenate(parts, axis=1)]
    if run.num_pages > 1:
        return [
            _padded(part, -(-part.shape[1] // num_lines) * num_lines).reshape(
                part.shape[0], -1, *page
            )
            for part in parts
        ]
    (words,) = parts
    if words.ndim < pages.ndim - 1:
        words = _padded(words, -(-words.shape[1] // page[1]) * page[1])
        words = words.reshape(words.shape[0], -1, page[1])
    return [words[:, None]]


def _written_dtype(run: _Run, stored_dtype: jnp.dtype, state: LayerState) -> jnp.dtype:
    """The dtype of the pages in which a run is written.

    XLA fuses nothing past a change to narrower words. It would then store the new state once more
    before it writes the state to the pages.
    """
    dtypes = {jnp.dtype(array.dtype) for array in run.arrays}
    if not state.fuses_writes or len(dtypes) > 1:
        return stored_dtype
    return max(stored_dtype, *dtypes, key=lambda dtype: dtype.itemsize)


def _common_lanes(run: _Run, pages: Pages) -> tuple[int, ...]:
    """The shape of a page's lines if each array of the run fills whole lines; otherwise ().

    If lines of an array are joined, a TPU copies the array. For pages, this is the whole cache.
    """
    lanes = pages.shape[3:]
    num_lanes = math.prod(lanes)
    counts = [array.num_numbers for array in run.arrays]
    counts += [array.num_bytes // pages.dtype.itemsize for array in run.arrays]
    return lanes if all(count % num_lanes == 0 for count in counts) else ()


def _padded(array: jax.Array, width: int) -> jax.Array:
    """Zeros after the numbers of axis 1, up to a width."""
    widths = [(0, 0)] * array.ndim
    widths[1] = (0, width - array.shape[1])
    return jnp.pad(array, widths)
