"""Large arrays are in huge pages if the system has them, and keep their values."""

import ctypes
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from models.platforms import huge_pages
from models.platforms.huge_pages import HUGE_PAGE_BYTES, use_huge_pages
from models.stored_kernels.column_panels import PanelKernel
from tests import on_device

PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has them")


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_ours = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_ours and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    return 0


@on_linux
@pytest.mark.skipif(
    not PAGES_SETTING.is_file() or "[never]" in PAGES_SETTING.read_text(),
    reason="this system has no huge pages",
)
def test_large_arrays_are_in_huge_pages_and_keep_their_numbers():
    numbers_np = np.random.default_rng(0).integers(0, 1 << 30, 16 * 2**20 // 4, np.int32)
    # Of a copy, because JAX may take an array of NumPy as its own memory.
    array = on_device.array(numbers_np.copy())
    num_bytes = use_huge_pages([array])
    # An older kernel collapses nothing at once, and says so.
    assert num_bytes in (0, *range(14 * 2**20, 16 * 2**20 + 1, HUGE_PAGE_BYTES))
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    assert huge_bytes_at(middle) >= num_bytes
    assert np.array_equal(array, numbers_np)


def test_small_arrays_are_left_alone(monkeypatch):
    monkeypatch.setattr(huge_pages, "_collapse", lambda *_: pytest.fail("asked for a small one"))
    assert use_huge_pages([on_device.zeros(1000), on_device.zeros(HUGE_PAGE_BYTES // 4)]) == 0


@on_linux
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="another device's memory")
def test_arrays_that_follow_each_other_in_memory_count_as_one(monkeypatch):
    asked = []
    kernel = on_device.zeros((512, 2048 + 5))
    panels = PanelKernel.of(kernel, 512).panels
    monkeypatch.setattr(huge_pages, "_collapse", lambda *args: asked.append(args[1:]) or 0)
    use_huge_pages([panels[3], *panels[:3], panels[4], on_device.zeros(1000)])
    assert asked == [(panels[0].unsafe_buffer_pointer(), kernel.nbytes)]


@on_linux
def test_system_that_refuses_changes_nothing(monkeypatch):
    class Refusing:
        def __init__(self, name: None) -> None:
            self.madvise = type("Madvise", (), {"__call__": lambda *_: -1})()

    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    array = on_device.ones(8 * HUGE_PAGE_BYTES // 4)
    assert use_huge_pages([array]) == 0
    assert jax.device_get(array).min() == 1
