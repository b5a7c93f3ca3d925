"""The rules that keep writes to the pages in place, each in one function.

Without them the results are the same, but XLA copies the whole cache: hundreds of milliseconds per
step. A format without ops of its own reads and writes through these functions. The ops of
`pallas_kernels` keep the rules themselves.
"""

import functools

import jax
import jax.numpy as jnp

from models.cache.format import Pages

# A signaling NaN. Arithmetic makes only quiet NaNs, but the compiler does not know that.
_NEVER_COMPUTED = 0x7FA5A5A5


def after(values: jax.Array, read: jax.Array) -> jax.Array:
    """Returns `values` unchanged, but dependent on `read`: they cannot be computed before it.

    Every write must depend by value on every earlier read of the pages. Otherwise a part of a layer
    that reads and a later part that writes have no order. On JAX 0.10, a barrier does not order
    them.

    Args:
        read: At least one number that was computed from what was read of the pages.
    """
    # Not `read.reshape(-1)[0]`: a TPU would compute and store all of `read` for it.
    first = jax.lax.slice(read, (0,) * read.ndim, (1,) * read.ndim).reshape(())
    bits = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits == _NEVER_COMPUTED, jnp.zeros_like(values), values)


def two_indices(indices: jax.Array, unused: jax.Array | int) -> jax.Array:
    """Appends `unused` to `indices` i32[n] if n is 1.

    On the CPU a gather or scatter with one index becomes a copy of the whole array.

    Args:
        unused: For a gather any valid index; for a scatter an index that is dropped.
    """
    return indices if indices.shape[0] > 1 else jnp.append(indices, unused)


def read_prefix(
    pages: Pages,  # [num_rows, num_blocks, width, ...]
    row: jax.Array | int,
    block_ids: jax.Array,  # i32[n], in [0, num_blocks)
    width: int,
) -> jax.Array:  # [n, width, ...], of the pages' dtype
    """The first words of whole pages, or the first lines of pages that are lines of words."""
    ids = two_indices(block_ids, 0)
    place = pages.at[row, ids, :width]
    read = place.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return read[: block_ids.shape[0]]


def write_prefix(
    pages: Pages,  # [num_rows, num_blocks, width, ...]
    row: jax.Array | int,
    block_ids: jax.Array,  # i32[n], no two alike; from num_blocks on nothing is written
    words: jax.Array,  # [n, k, ...], of the pages' dtype
) -> Pages:
    """The pages with the first `k` words or lines of some replaced."""
    ids = two_indices(block_ids, pages.shape[1])
    if ids.shape != block_ids.shape:
        words = jnp.concatenate([words, words])
    place = pages.at[row, ids, : words.shape[1]]
    return place.set(words, mode="drop", wrap_negative_indices=False)


def view_as(
    pages: Pages,  # [num_rows, num_blocks, width]
    dtype: jnp.dtype,
) -> jax.Array:  # [num_rows, num_blocks, bytes of a page / bytes of one of `dtype`]
    """The bits of the pages as numbers of `dtype`. No copy if `Platform.fuses_state_writes`."""
    if pages.dtype == dtype:
        return pages
    return recast(pages.reshape(-1, pages.shape[2]), dtype).reshape(*pages.shape[:2], -1)


def recast(
    numbers: jax.Array,  # [n, k], or [n, k, lanes] of pages that are lines
    dtype: jnp.dtype,
) -> jax.Array:  # [n, bytes of the k numbers / bytes of one of `dtype`, ...]
    """The bits of values as words of a page, or of words as values.

    Without lanes, the parts of a wide number are neighbors. With lanes, the wide number i of k has
    its lowest bits in the narrow number i and its next bits in the number i + k, because a TPU
    would store an axis of 2 neighbors as 128 numbers.
    """
    dtype = jnp.dtype(dtype)
    old_bits, new_bits = 8 * numbers.dtype.itemsize, 8 * dtype.itemsize
    if numbers.ndim == 2:
        if old_bits < new_bits:
            numbers = numbers.reshape(numbers.shape[0], -1, new_bits // old_bits)
        return jax.lax.bitcast_convert_type(numbers, dtype).reshape(numbers.shape[0], -1)
    if old_bits > new_bits:
        return jnp.concatenate(parts_of(numbers, dtype), axis=1)
    if old_bits < new_bits:
        # Each part is converted by itself. Otherwise, a TPU would store the result for all.
        parts = (
            jax.lax.bitcast_convert_type(part, f"uint{old_bits}").astype(f"uint{new_bits}")
            for part in jnp.split(numbers, new_bits // old_bits, axis=1)
        )
        shifted = (part << idx * old_bits for idx, part in enumerate(parts))
        numbers = functools.reduce(jnp.bitwise_or, shifted)
    return jax.lax.bitcast_convert_type(numbers, dtype)


def parts_of(
    numbers: jax.Array,  # as in `recast`
    dtype: jnp.dtype,
) -> list[jax.Array]:  # [n, k, lanes] each
    """What `recast` joins on axis 1 for pages that are lines: the lowest bits of all numbers first.

    One array, as `recast` returns it, if `dtype` is not narrower or there are no lanes.
    """
    dtype = jnp.dtype(dtype)
    old_bits, new_bits = 8 * numbers.dtype.itemsize, 8 * dtype.itemsize
    if old_bits <= new_bits or numbers.ndim == 2:
        return [recast(numbers, dtype)]
    bits = jax.lax.bitcast_convert_type(numbers, f"uint{old_bits}")
    return [
        jax.lax.bitcast_convert_type((bits >> shift).astype(f"uint{new_bits}"), dtype)
        for shift in range(0, old_bits, new_bits)
    ]
