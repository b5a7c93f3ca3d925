"""`HeadSplit`: how the devices of a mesh share an axis whose entries belong to heads."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """Consecutive entries of an axis, head after head. A part that all heads use is one head."""

    num_heads: int
    head_dim: int  # entries of each head

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """An axis of ranges of heads, one range after the other.

    On a mesh, device after device has its own heads of every range, in the order of the ranges. If
    a range has fewer heads than there are devices, neighboring devices have copies of a head.

    Args:
        ranges: All entries of the axis.
        heads_of_layer: The number of heads of the layer's state, and of heads that its heads share
            (`num_parts`). All arrays of a layer have the same numbers, and are split together.
    """

    ranges: tuple[HeadRange, ...]
    heads_of_layer: tuple[int, ...]

    @property
    def size(self) -> int:
        """Entries of the whole axis."""
        return sum(part.size for part in self.ranges)

    def is_split(self, num_devices: int) -> bool:
        return num_parts(self.heads_of_layer, num_devices) > 1

    def size_on_each_of(self, num_devices: int) -> int:
        """Entries that each device has."""
        return len(self.order(num_devices)) // num_parts(self.heads_of_layer, num_devices)

    def order(self, num_devices: int) -> np.ndarray:
        """i64[entries of all devices], the entries of the first device, then of the second."""
        parts = num_parts(self.heads_of_layer, num_devices)
        return np.concatenate(
            [entries for device in range(parts) for entries in self._of_device(device, parts)]
        )

    def _of_device(self, device: int, num_devices: int) -> Iterator[np.ndarray]:
        start = 0
        for part in self.ranges:
            first = device * part.num_heads // num_devices
            num_own = max(part.num_heads // num_devices, 1)
            yield start + np.arange(first * part.head_dim, (first + num_own) * part.head_dim)
            start += part.size


def num_parts(heads_of_layer: tuple[int, ...], num_devices: int) -> int:
    """Parts that a layer is split into: one for each device, or one if all devices have it whole.

    Each device must have the same number of heads of the state. The heads of the state share other
    heads, such as keys or groups: each device has some of these, or has one with other devices.

    Args:
        heads_of_layer: The number of heads of the state, then of those that they share. It is a
            multiple of each of these.
    """
    num_heads, *shared = heads_of_layer
    fits = num_heads % num_devices == 0 and all(
        num % num_devices == 0 or num_devices % num == 0 for num in shared
    )
    return num_devices if fits else 1


def heads_on_each(num_heads: int, parts: int) -> int:
    """Heads that each device has of `num_heads`, if a layer is split into `parts`."""
    return max(num_heads // parts, 1)
