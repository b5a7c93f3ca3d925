"""Random inputs of full size, drawn on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, made where they are used: half a gigabyte never crosses the bus."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_cache(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """A cache `[num_rows, num_blocks, ...]` whose block 0, which no table names, is NaN."""
    drawn = jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
    is_null_block = (jnp.arange(shape[1]) == 0).reshape(1, -1, *(1 for _ in shape[2:]))
    return jnp.where(is_null_block, jnp.asarray(jnp.nan, drawn.dtype), drawn)


def nan(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Poison: what a body does not write stays NaN."""
    return jnp.full(shape, jnp.nan, jnp.dtype(dtype))


def scattered_tables(
    rng: np.random.Generator, num_blocks_of_req: list[int]
) -> tuple[np.ndarray, int]:
    """Block tables over blocks in random order, and the number of blocks, the null block included.

    Entries past a request's blocks point to the null block.
    """
    num_blocks = 1 + sum(num_blocks_of_req)
    block_ids = 1 + rng.permutation(num_blocks - 1).astype(np.int32)
    tables = np.zeros((len(num_blocks_of_req), max(1, *num_blocks_of_req)), np.int32)
    start = 0
    for req_idx, num in enumerate(num_blocks_of_req):
        tables[req_idx, :num] = block_ids[start : start + num]
        start += num
    return tables, num_blocks


def poisoned_cache(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """A cache in which nothing was ever written: all NaN, or in int8 all 85."""
    return jnp.full(shape, 85 if jnp.dtype(dtype) == jnp.int8 else jnp.nan, jnp.dtype(dtype))
