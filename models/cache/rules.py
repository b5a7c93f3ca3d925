"""The rules that keep writes to the pages in place, each in one function.

Without them the results are the same, but XLA copies the whole cache: hundreds of milliseconds per
step. A format without ops of its own reads and writes through these functions. The ops of
`pallas_kernels` keep the rules themselves.
"""

import jax
import jax.numpy as jnp

from models.cache.format import Pages

# A signalling NaN: arithmetic makes quiet ones alone, and the compiler does not know that.
_NEVER_COMPUTED = 0x7FA5A5A5


def after(values: jax.Array, read: jax.Array) -> jax.Array:
    """Returns `values` unchanged, but dependent on `read`: they cannot be computed before it.

    Every write must depend by value on every earlier read of the pages: two parts of one layer, of
    which the first reads and the second writes, have no order otherwise. On JAX 0.10 a barrier
    does not give them one.

    Args:
        read: At least one number that was computed from what was read of the pages.
    """
    bits = jax.lax.bitcast_convert_type(read.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return jnp.where(bits == _NEVER_COMPUTED, jnp.zeros_like(values), values)


def two_indices(indices: jax.Array, unused: jax.Array | int) -> jax.Array:
    """Appends `unused` to `indices` i32[n] if n is 1.

    On the CPU a gather or scatter with one index becomes a copy of the whole array.

    Args:
        unused: For a gather any valid index; for a scatter an index that is dropped.
    """
    return indices if indices.shape[0] > 1 else jnp.append(indices, unused)


def read_prefix(
    pages: Pages,  # [num_rows, num_blocks, num_words]
    row: jax.Array | int,
    block_ids: jax.Array,  # i32[n], in [0, num_blocks)
    num_words: int,
) -> jax.Array:  # [n, num_words], of the pages' dtype
    """The first words of whole pages."""
    ids = two_indices(block_ids, 0)
    place = pages.at[row, ids, :num_words]
    read = place.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return read[: block_ids.shape[0]]


def write_prefix(
    pages: Pages,  # [num_rows, num_blocks, num_words]
    row: jax.Array | int,
    block_ids: jax.Array,  # i32[n], no two alike; from num_blocks on nothing is written
    words: jax.Array,  # [n, k], of the pages' dtype
) -> Pages:
    """The pages with the first `k` words of some replaced."""
    ids = two_indices(block_ids, pages.shape[1])
    if ids.shape != block_ids.shape:
        words = jnp.concatenate([words, words])
    place = pages.at[row, ids, : words.shape[1]]
    return place.set(words, mode="drop", wrap_negative_indices=False)


def as_words(
    values: jax.Array,  # [n, k]; if its dtype is narrower, k numbers fill whole words
    pages: Pages,
) -> jax.Array:  # [n, num_words], of the pages' dtype
    """The bits of values as words of a page. Values are bitcast, never the pages."""
    num_values = pages.dtype.itemsize // values.dtype.itemsize
    if num_values > 1:
        values = values.reshape(values.shape[0], -1, num_values)
    return jax.lax.bitcast_convert_type(values, pages.dtype).reshape(values.shape[0], -1)


def from_words(
    words: jax.Array,  # [n, num_words], of the pages' dtype
    dtype: jnp.dtype,
) -> jax.Array:  # [n, k]
    """The inverse of `as_words`."""
    num_words = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if num_words > 1:
        words = words.reshape(words.shape[0], -1, num_words)
    return jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)
