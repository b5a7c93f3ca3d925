"""Asks Linux to keep large arrays of a CPU in pages of 2 MiB instead of 4 KiB.

A step reads all weights, and blocks all over the KV cache. With small pages, the processor looks up
addresses all the time. Many distributions give huge pages only to programs that ask for them, and
JAX does not ask.
"""

import ctypes
import math
import sys
from collections.abc import Iterable

import jax
import numpy as np
from numpy.typing import DTypeLike

HUGE_PAGE_BYTES = 2 * 2**20
# <linux/mman.h>. The first lets new pages be huge, the second makes existing pages huge.
MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


def empty_in_huge_pages(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array without values, which the system puts into huge pages as it is written.

    This costs less than `use_huge_pages`, for which the system copies an array. The array begins at
    a huge page. A device that may share it (`jax.device_put` on a CPU) copies nothing. Arrays
    smaller than a huge page are ordinary ones.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return np.empty(shape, dtype)
    memory_np = np.empty(num_bytes + HUGE_PAGE_BYTES, np.uint8)
    start = -memory_np.ctypes.data % HUGE_PAGE_BYTES
    array_np = memory_np[start : start + num_bytes].view(dtype).reshape(shape)
    if sys.platform.startswith("linux"):
        size = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        load_libc().madvise(array_np.ctypes.data, size, MADV_HUGEPAGE)
    return array_np


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Asks for huge pages for the arrays of a CPU that are larger than such a page.

    Arrays that follow each other in memory, such as the panels of a kernel, count as one. The
    values of arrays do not change. If the system has no huge pages, or none left, nothing happens.

    Returns:
        Bytes that the system has put into huge pages.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc = load_libc()
    return sum(
        _collapse(libc, start, end - start)
        for start, end in _stretches(arrays)
        if end - start > HUGE_PAGE_BYTES
    )


def load_libc() -> ctypes.CDLL:
    """The C library, with the types of `madvise`."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _stretches(arrays: Iterable[jax.Array]) -> list[tuple[int, int]]:
    """First addresses and ends of the memory of arrays on a CPU."""
    pieces = [
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in arrays
        if array.is_fully_addressable and not array.is_deleted()
        for shard in array.addressable_shards
        if shard.device.platform == "cpu"
    ]
    stretches: list[tuple[int, int]] = []
    for start, num_bytes in sorted(pieces):
        is_next = stretches and stretches[-1][1] == start
        first = stretches.pop()[0] if is_next else start
        stretches.append((first, start + num_bytes))
    return stretches


def _collapse(libc: ctypes.CDLL, address: int, num_bytes: int) -> int:
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    size = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start
    if size <= 0 or libc.madvise(start, size, MADV_HUGEPAGE) != 0:
        return 0
    return size if libc.madvise(start, size, _MADV_COLLAPSE) == 0 else 0
