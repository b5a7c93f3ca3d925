"""The process knows what memory it occupies, and returns what was freed."""

import ctypes
import platform
import sys

import numpy as np
import pytest

from models.platforms.resident_memory import resident_bytes, return_freed_memory

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@on_linux
def test_written_memory_is_resident():
    before = resident_bytes()
    array_np = np.ones(2**26, np.uint8)
    assert resident_bytes() - before > 0.9 * array_np.nbytes


@on_linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_freed_memory_is_returned():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size, count = 2**16, 2**10
    pieces = [libc.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    # The last piece stays, so that glibc alone would return nothing.
    for piece in pieces[:-1]:
        libc.free(piece)
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 0.8 * size * count
    libc.free(pieces[-1])
