"""Zeros on a CPU, in memory that Linux provides page by page when a page is first written."""

import ctypes
import math
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import buffer_callback
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models.platforms.huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, load_libc

# <linux/mman.h>: private memory without a file reads as zeros from then on.
_MADV_DONTNEED = 4


def lazy_zeros(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
    """Zeros on one CPU device, in memory that XLA allocates and may reuse.

    `jnp.zeros` writes every byte, so a KV cache of gigabytes would take seconds and be resident
    before its first use. Small arrays and other systems have no gain.

    Raises:
        jax.errors.JaxRuntimeError: The address space has no room.
    """
    is_small = math.prod(shape) * jnp.dtype(dtype).itemsize < 2 * HUGE_PAGE_BYTES
    if is_small or not sys.platform.startswith("linux") or len(sharding.device_set) > 1:
        return jnp.zeros(shape, dtype, device=sharding)
    # The callback gets memory to which XLA has written nothing.
    allocate = buffer_callback.buffer_callback(
        lambda _, output: _clear(np.asarray(output)), jax.ShapeDtypeStruct(shape, dtype)
    )
    return jax.jit(lambda: allocate(), out_shardings=sharding)().block_until_ready()


def _clear(array_np: np.ndarray) -> None:
    """Fills an array with zeros. Returns whole pages to Linux, which provides cleared ones."""
    start, end = array_np.ctypes.data, array_np.ctypes.data + array_np.nbytes
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    libc = load_libc()
    if last <= first or libc.madvise(first, last - first, _MADV_DONTNEED) != 0:
        array_np.fill(0)
        return
    # Pages of 2 MiB are faster to read, as in `huge_pages.py`. A system without them refuses.
    libc.madvise(first, last - first, MADV_HUGEPAGE)
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)
