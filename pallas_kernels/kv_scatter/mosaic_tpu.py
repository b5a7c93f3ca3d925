"""Mosaic TPU body of `kv_scatter`: reads tiles of the cache, merges the new rows, writes them back.

HBM is tiled on a TPU: 8 rows (token positions) of a head are interleaved, so one row cannot be
written alone. The kernel reads and writes strips: `strip_rows` rows of one block, of every head.

XLA lists the segments before the launch. A segment is a run of tokens with consecutive slots in one
strip. With strips of 8 rows, slots [5, 6, 7, 8, 30, 31] are the segments 5:8, 8:9 and 30:32.
Segments are sorted by slot. So the segments of a strip follow each other and share its buffer, and
a strip is read once and written once in any order of tokens.

The parts of a block (K and V) are neighbours in memory, so the kernel sees them as more heads of
one cache: with 8 KV heads, heads 0 to 7 of a block are its keys and 8 to 15 its values.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.async_copy import AsyncCopy

LANES = 128
ROW_TILE = 8  # rows that are interleaved in HBM

# Guesses, not measured. Short strips copy less for a decode token. Long strips need fewer copies
# for a prompt.
MAX_STRIP_ROWS = 64
NUM_TOKENS_FOR_LONG_STRIPS = 512
MAX_STRIPS_UNDER_WAY = 8
BUFFER_BYTES = 16 * 2**20

MAX_BUFFER_BYTES = 48 * 2**20
VMEM_LIMIT_BYTES = 96 * 2**20
# Segments are three scalars per token in SMEM. They may take half of its 1 MiB (v5e, v6e).
MAX_TOKENS = 2**19 // (3 * 4)


class _Refs(NamedTuple):
    """The refs of one launch, in the order in which Pallas passes them."""

    # Scalars, in SMEM. The segments come first; the entries after `num_segments` are unused.
    row: jax.Ref  # i32[1]
    num_segments: jax.Ref  # i32[1]
    first_slots: jax.Ref  # i32[num_tokens]
    first_tokens: jax.Ref  # i32[num_tokens]
    counts: jax.Ref  # i32[num_tokens]
    # In HBM. `cache_in` and `cache` are the same memory. `num_heads` counts the heads of all parts.
    new: jax.Ref  # [num_heads, num_tokens, head_dim]
    cache_in: jax.Ref
    cache: jax.Ref  # [num_rows, num_blocks, num_heads, block_size, head_dim]
    # Rings of buffers in VMEM.
    strips: jax.Ref  # [ring, num_heads, strip_rows, head_dim]
    news: jax.Ref  # [ring, num_heads, strip_rows + ROW_TILE, head_dim]
    read_sems: jax.Ref  # one DMA semaphore per buffer
    write_sems: jax.Ref
    new_sems: jax.Ref


def kv_scatter_mosaic_tpu(
    kv_cache: jax.Array,  # f[num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None,  # like k; None if the cache has one part
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `api.kv_scatter`; `interpret` is passed to `pl.pallas_call`."""
    num_tokens = slots.shape[0]
    if num_tokens == 0:
        return kv_cache
    parts = _parts(k, v)
    num_rows, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_heads = len(parts) * num_kv_heads
    cache = kv_cache.reshape(num_rows, -1, num_heads, block_size, head_dim)
    strip_rows = _strip_rows(num_tokens, block_size)
    num_new_rows = strip_rows + ROW_TILE
    segments = _list_segments(slots, cache.shape[1] * block_size, strip_rows)
    ring = _ring_length(kv_cache, len(parts), strip_rows)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars = 5
    cache = pl.pallas_call(
        functools.partial(_scatter_segments, strip_rows=strip_rows, ring=ring),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(1,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((ring, num_heads, strip_rows, head_dim), cache.dtype),
                pltpu.VMEM((ring, num_heads, num_new_rows, head_dim), cache.dtype),
                *[pltpu.SemaphoreType.DMA((ring,)) for _ in range(3)],
            ],
        ),
        input_output_aliases={num_scalars + 1: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
        name="kv_scatter",
    )(
        *(jnp.asarray(row, jnp.int32).reshape(1), *segments),
        *(_rows_by_head(parts, num_new_rows), cache),
    )
    return cache.reshape(kv_cache.shape)


def misfit(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    row: jax.Array | int,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    del row
    if kv_cache.dtype == jnp.uint16:
        return "kv_cache is uint16; 16-bit floats must be stored in their own dtype"
    if kv_cache.dtype == jnp.float16:
        return "kv_cache is float16, for which a TPU has no arithmetic"
    if kv_cache.shape[-1] % LANES:
        # XLA would lay such a cache out with the blocks innermost, and copy it for the kernel.
        return f"kv_cache has head_dim {kv_cache.shape[-1]}; it must be a multiple of {LANES}"
    if kv_cache.shape[3] % ROW_TILE:
        return f"block_size is {kv_cache.shape[3]}; it must be a multiple of {ROW_TILE}"
    if slots.shape[0] > MAX_TOKENS:
        return f"{slots.shape[0]} tokens are more than SMEM has room for, {MAX_TOKENS}"
    strip_rows = _strip_rows(slots.shape[0], kv_cache.shape[3])
    num_bytes = 2 * _bytes_of_one(kv_cache, len(_parts(k, v)), strip_rows)
    if num_bytes > MAX_BUFFER_BYTES:
        return f"two buffers would take {num_bytes} bytes of VMEM, more than {MAX_BUFFER_BYTES}"
    return None


def _parts(k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, ...]:
    return (k,) if v is None else (k, v)


def _strip_rows(num_tokens: int, block_size: int) -> int:
    if num_tokens < NUM_TOKENS_FOR_LONG_STRIPS:
        return ROW_TILE
    return math.gcd(block_size, MAX_STRIP_ROWS)


def _ring_length(kv_cache: jax.Array, num_parts: int, strip_rows: int) -> int:
    """Number of buffers of each kind: one is merged while the others are read or written."""
    fitting = BUFFER_BYTES // _bytes_of_one(kv_cache, num_parts, strip_rows)
    return max(2, min(1 + MAX_STRIPS_UNDER_WAY, fitting))


def _bytes_of_one(kv_cache: jax.Array, num_parts: int, strip_rows: int) -> int:
    """VMEM bytes of one strip of all parts, and of the new rows for it."""
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    num_rows = num_parts * num_kv_heads * (2 * strip_rows + ROW_TILE)
    return num_rows * head_dim * kv_cache.dtype.itemsize


def _rows_by_head(parts: tuple[jax.Array, ...], min_rows: int) -> jax.Array:
    """[num_heads, num_tokens, head_dim], padded to whole row tiles and to `min_rows`."""
    new = jnp.concatenate(parts, axis=1)
    num_tokens = new.shape[0]
    num_rows = max(-(-num_tokens // ROW_TILE) * ROW_TILE, min_rows)
    return jnp.pad(new, ((0, num_rows - num_tokens), (0, 0), (0, 0))).transpose(1, 0, 2)


def _list_segments(
    slots: jax.Array,  # i32[num_tokens]
    num_slots: int,
    strip_rows: int,
) -> tuple[jax.Array, ...]:
    """Number of segments, i32[1], and the first slot, first token and length of each."""
    num_tokens = slots.shape[0]
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    is_real = (slots >= 0) & (slots < num_slots)
    goes_on = (slots[1:] == slots[:-1] + 1) & (slots[1:] % strip_rows != 0)
    goes_on = jnp.pad(goes_on & is_real[1:] & is_real[:-1], (1, 0))
    # A segment that begins with this token ends before the next token that begins a segment.
    next_end = lax.cummin(jnp.where(goes_on, num_tokens, token_idx), reverse=True)
    next_end = jnp.append(next_end[1:], jnp.int32(num_tokens))

    is_first = is_real & ~goes_on
    key = jnp.where(is_first, slots, jnp.iinfo(jnp.int32).max)
    fields = lax.sort((key, token_idx, next_end - token_idx), num_keys=1)
    return jnp.sum(is_first, dtype=jnp.int32).reshape(1), *fields


def _scatter_segments(*refs: jax.Ref, strip_rows: int, ring: int) -> None:
    """Loops over the segments, and reads ahead into all buffers except the one being merged.

    Strip n uses buffer n % ring, so strip n - ring must be written before strip n is read. New rows
    have their own ring of buffers, with one entry per segment.
    """
    refs = _Refs(*refs)
    num_segments = refs.num_segments[0]
    block_size = refs.cache.shape[3]

    def strip_of(segment: jax.Array) -> jax.Array:
        return refs.first_slots[segment] // strip_rows

    def is_new_strip(segment: jax.Array) -> jax.Array:
        before = strip_of(jnp.maximum(segment - 1, 0))
        return (segment == 0) | (strip_of(segment) != before)

    def is_read(segment: jax.Array) -> jax.Array:
        """Whether the segment reads its strip: it is the strip's first, and does not fill it."""
        return is_new_strip(segment) & (refs.counts[segment] < strip_rows)

    def strip_copy(segment: jax.Array, strip_idx: jax.Array, is_write: bool) -> AsyncCopy:
        slot = refs.first_slots[segment] // strip_rows * strip_rows
        start = pl.multiple_of(slot % block_size, strip_rows)
        place = refs.cache.at[refs.row[0], slot // block_size, :, pl.ds(start, strip_rows)]
        buffer = strip_idx % ring
        strip = refs.strips.at[buffer]
        if is_write:
            return pltpu.make_async_copy(strip, place, refs.write_sems.at[buffer])
        return pltpu.make_async_copy(place, strip, refs.read_sems.at[buffer])

    def new_start(segment: jax.Array) -> jax.Array:
        """The first new row to fetch, at a whole row tile."""
        last_start = refs.new.shape[1] - refs.news.shape[2]
        start = jnp.minimum(refs.first_tokens[segment] // ROW_TILE * ROW_TILE, last_start)
        return pl.multiple_of(start, ROW_TILE)

    def new_copy(segment: jax.Array) -> AsyncCopy:
        rows = pl.ds(new_start(segment), refs.news.shape[2])
        buffer = segment % ring
        return pltpu.make_async_copy(
            refs.new.at[:, rows], refs.news.at[buffer], refs.new_sems.at[buffer]
        )

    def fetch(segment: jax.Array, num_strips: jax.Array) -> jax.Array:
        """Starts the copies of a segment, if it exists. Returns the number of strips begun."""
        exists = segment < num_segments
        segment = jnp.minimum(segment, num_segments - 1)
        begins = exists & is_new_strip(segment)

        @pl.when(begins & (num_strips >= ring))
        def _wait_for_buffer() -> None:
            strip_copy(segment, num_strips, is_write=True).wait()

        @pl.when(exists & is_read(segment))
        def _read_strip() -> None:
            strip_copy(segment, num_strips, is_write=False).start()

        @pl.when(exists)
        def _fetch_new() -> None:
            new_copy(segment).start()

        return num_strips + begins.astype(jnp.int32)

    def merge(segment: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple:
        num_strips_begun, num_strips_done = carry
        num_strips_begun = fetch(segment + ring - 1, num_strips_begun)
        strip_idx = num_strips_done
        new_copy(segment).wait()

        @pl.when(is_read(segment))
        def _wait_for_strip() -> None:
            strip_copy(segment, strip_idx, is_write=False).wait()

        first_row = refs.first_slots[segment] % strip_rows
        _merge_rows(
            refs.strips.at[strip_idx % ring],
            refs.news.at[segment % ring],
            first_row=first_row,
            count=refs.counts[segment],
            shift=first_row - (refs.first_tokens[segment] - new_start(segment)),
        )
        after = jnp.minimum(segment + 1, num_segments - 1)
        ends = (segment == num_segments - 1) | is_new_strip(after)

        @pl.when(ends)
        def _write_strip() -> None:
            strip_copy(segment, strip_idx, is_write=True).start()

        return num_strips_begun, num_strips_done + ends.astype(jnp.int32)

    @pl.when(num_segments > 0)
    def _scatter() -> None:
        begun = lax.fori_loop(0, ring - 1, fetch, jnp.int32(0))
        _, num_strips = lax.fori_loop(0, num_segments, merge, (begun, jnp.int32(0)))

        def wait_for_write(strip_idx: jax.Array, _: None) -> None:
            # A wait only depends on the number of bytes, which is the same for all strips.
            strip_copy(0, strip_idx, is_write=True).wait()

        lax.fori_loop(jnp.maximum(num_strips - ring, 0), num_strips, wait_for_write, None)


def _merge_rows(
    strip: jax.Ref,  # [num_heads, strip_rows, head_dim]
    new: jax.Ref,  # [num_heads, strip_rows + ROW_TILE, head_dim]
    *,
    first_row: jax.Array,
    count: jax.Array,
    shift: jax.Array,
) -> None:
    """Moves `new` down by `shift` rows, and writes `count` of them to `strip` at `first_row`."""
    strip_rows, num_new_rows = strip.shape[1], new.shape[1]
    # Rows are moved as float32. The casts to float32 and back do not change a narrower float.
    shift = jnp.where(shift < 0, shift + num_new_rows, shift)

    def merge_head(head: jax.Array, _: None) -> None:
        moved = pltpu.roll(new[head].astype(jnp.float32), shift, axis=0)[:strip_rows]
        row = lax.broadcasted_iota(jnp.int32, moved.shape, 0)
        is_new = (row >= first_row) & (row < first_row + count)
        old = strip[head].astype(jnp.float32)
        strip[head] = jnp.where(is_new, moved, old).astype(strip.dtype)

    lax.fori_loop(0, strip.shape[0], merge_head, None)
