"""Two ways to bring a checkpoint's array to a device, cast and transposed."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from models.platforms.huge_pages import empty_in_huge_pages
from models.platforms.processor import num_cores

# Rows and columns that the host casts and transposes at a time. They stay in the processor's cache.
_TILE = (512, 128)
# Fewer numbers are not worth the start of threads.
_MIN_FOR_THREADS = 2**20


def cast_on_host(
    weight_np: np.ndarray,
    dtype: jnp.dtype,
    *,
    is_transposed: bool,
    device: jax.Device | None = None,
) -> jax.Array:
    """Casts on the host with all cores, into new memory.

    Args:
        is_transposed: Whether the last two axes are swapped.
        device: None is JAX's default device.
    """
    shape = weight_np.shape
    if is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    array_np = empty_in_huge_pages(shape, dtype)
    target_np = array_np.swapaxes(-1, -2) if is_transposed else array_np

    def cast(tile: tuple[int | slice, ...]) -> None:
        # Numbers too large for float16 become infinite, as on a GPU.
        with np.errstate(over="ignore"):
            target_np[tile] = weight_np[tile].astype(dtype)

    tiles = _tiles(weight_np.shape)
    if weight_np.size < _MIN_FOR_THREADS:
        for tile in tiles:
            cast(tile)
    else:
        with ThreadPoolExecutor(num_cores()) as pool:
            for _ in pool.map(cast, tiles):
                pass
    return jax.device_put(array_np, device, may_alias=True)


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Indices of the tiles of each matrix, or one index of a whole vector."""
    if len(shape) < 2:
        yield ()
        return
    num_rows, num_columns = _TILE
    for matrix_idx in np.ndindex(shape[:-2]):
        for row in range(0, shape[-2], num_rows):
            for column in range(0, shape[-1], num_columns):
                yield (
                    *matrix_idx,
                    slice(row, row + num_rows),
                    slice(column, column + num_columns),
                )


def cast_on_device(
    weight_np: np.ndarray,
    dtype: jnp.dtype,
    *,
    is_transposed: bool,
    device: jax.Device | None = None,
) -> jax.Array:
    """As `cast_on_host`, by a program of the device."""
    return _cast(jax.device_put(weight_np, device), dtype, is_transposed)


@functools.partial(jax.jit, static_argnames=("dtype", "is_transposed"))
def _cast(weight: jax.Array, dtype: jnp.dtype, is_transposed: bool) -> jax.Array:
    weight = weight.astype(dtype)
    # The copy is forced: a program that changes nothing may return its argument, which on a CPU
    # can be the reader's own memory.
    return weight.swapaxes(-1, -2) if is_transposed else jnp.copy(weight)
