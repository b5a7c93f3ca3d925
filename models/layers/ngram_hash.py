"""Hashes of n-grams in 64 bits, computed with integers of 32 bits."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_LOW = 0xFFFF


class _Wide(NamedTuple):
    """Unsigned integers of 64 bits."""

    high: jax.Array  # u32[...]
    low: jax.Array  # u32[...]


def hash_ngrams(
    token_ids: jax.Array,  # i32[num_tokens, ngram_size], of each token and of those before it
    multipliers: Sequence[int],
    sizes: Sequence[int],
) -> jax.Array:  # i32[num_tokens, num_heads]
    """The row of each head in a table that has the rows of all heads, one head after the other.

    Each token id of an n-gram is multiplied by a multiplier. The hash is the exclusive or of these
    products. The row within a head is the remainder of the hash divided by the head's size.

    Args:
        multipliers: The product of a multiplier and a token id must be below 2**64.
        sizes: Rows of each head, below 2**31. First come the heads of 2-grams, then as many of
            3-grams, and so on.
    """
    products = [
        _times(token_ids[:, idx].astype(jnp.uint32), multiplier)
        for idx, multiplier in enumerate(multipliers)
    ]
    heads_per_ngram = len(sizes) // (len(products) - 1)
    first_rows = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    rows, mixed = [], products[0]
    for idx, product in enumerate(products[1:]):
        mixed = _Wide(mixed.high ^ product.high, mixed.low ^ product.low)
        own = slice(idx * heads_per_ngram, (idx + 1) * heads_per_ngram)
        rows.append(_remainders(mixed, sizes[own]).astype(jnp.int32) + first_rows[own])
    return jnp.concatenate(rows, axis=1)


def _times(x: jax.Array, factor: int) -> _Wide:
    """The lower 64 bits of u32[n] times an integer of 64 bits."""
    factor_high, factor_low = divmod(factor, 2**32)
    x_1, x_0 = x >> 16, x & _LOW
    f_1, f_0 = map(np.uint32, divmod(factor_low, 2**16))
    middle = (x_0 * f_0 >> 16) + (x_0 * f_1 & _LOW) + (x_1 * f_0 & _LOW)
    high = x_1 * f_1 + (x_0 * f_1 >> 16) + (x_1 * f_0 >> 16) + (middle >> 16)
    return _Wide(high + x * np.uint32(factor_high), x * np.uint32(factor_low))


def _remainders(x: _Wide, sizes: Sequence[int]) -> jax.Array:  # u32[n, num_sizes]
    """The remainders of u64[n] divided by each size."""
    # A remainder of 25 bits leaves room for 7 bits more.
    num_bits = 32 - max(sizes).bit_length()
    divisors = np.array(sizes, np.uint32)
    remainder = x.high[:, None] % divisors
    start = 32
    while start:
        count = min(num_bits, start)
        start -= count
        bits = x.low[:, None] >> np.uint32(start) & np.uint32(2**count - 1)
        remainder = (remainder << np.uint32(count) | bits) % divisors
    return remainder
