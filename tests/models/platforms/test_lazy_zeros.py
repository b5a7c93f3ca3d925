"""A large array of zeros takes memory only where something was written."""

import ctypes
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from models.platforms import lazy_zeros as module
from models.platforms.lazy_zeros import lazy_zeros

MIB = 2**20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or jax.default_backend() != "cpu",
    reason="memory of other systems and devices",
)


def make_zeros(num_mib: int, dtype: str = "float32") -> jax.Array:
    sharding = SingleDeviceSharding(jax.devices()[0])
    return lazy_zeros((4, num_mib * MIB // 4 // jnp.dtype(dtype).itemsize), dtype, sharding)


def resident_bytes(array: jax.Array) -> int:
    """Bytes in memory of the mapping that holds an array."""
    address = array.unsafe_buffer_pointer()
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_ours = int(bounds[1], 16) <= address + array.nbytes // 2 < int(bounds[2], 16)
        elif is_ours and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no mapping holds the array")


def test_memory_is_taken_by_the_first_write_and_donation_keeps_the_place():
    pages = make_zeros(256)
    assert resident_bytes(pages) < 16 * MIB
    address = pages.unsafe_buffer_pointer()
    write = jax.jit(lambda x: x.at[2, :1000].set(7), donate_argnums=0)
    pages = write(pages)
    assert pages.unsafe_buffer_pointer() == address, "a copy would write every page"
    assert resident_bytes(pages) < 24 * MIB
    row_np = np.asarray(pages[2, :2000])
    assert row_np[:1000].min() == 7 and not row_np[1000:].any()


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("num_bytes", [0, 5, 4096, 9 * 4096 + 7])
def test_memory_that_held_other_numbers_is_cleared(dtype, num_bytes):
    buffer = ctypes.create_string_buffer(b"\xff" * (num_bytes + 64))
    array_np = np.frombuffer(buffer, np.uint8, num_bytes, offset=24)
    module._clear(array_np)
    assert not array_np.any()
    rest = buffer.raw[:24] + buffer.raw[24 + num_bytes : num_bytes + 64]
    assert set(rest) == {0xFF}, "only the array is cleared"


def test_system_that_refuses_gets_zeros_all_the_same(monkeypatch):
    class Refusing:
        def __init__(self, name: None) -> None:
            self.madvise = type("Madvise", (), {"__call__": lambda *_: -1})()

    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    array_np = np.ones(100_000, np.float32)
    module._clear(array_np)
    assert not array_np.any()


@pytest.mark.parametrize("num_mib", [1, 64])
def test_zeros_have_the_shape_the_dtype_and_the_place_that_were_asked_for(num_mib):
    zeros = make_zeros(num_mib, "uint16")
    assert (zeros.shape, zeros.dtype) == ((4, num_mib * MIB // 8), jnp.uint16)
    assert zeros.sharding == SingleDeviceSharding(jax.devices()[0])
    assert not np.asarray(zeros).any()
