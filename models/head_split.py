"""`HeadSplit`: how the devices of a mesh share an axis whose entries belong to heads."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """Consecutive entries of an axis, head after head.

    Entries that all heads use count as one head.
    """

    num_heads: int
    head_dim: int  # entries of each head

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """An axis of ranges of heads, one range after the other.

    On a mesh, the axis has the entries of the first device, then those of the second, and so on.
    Each device has its heads of the first range, then of the second, and so on. If a range has
    fewer heads than there are devices, neighboring devices have copies of a head.

    Args:
        ranges: All entries of the axis.
        heads_of_layer: As in `num_parts`. The arrays of a layer have equal numbers here, so they
            are split together or not at all.
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
        """i64[entries of all devices], indices of the first device's entries, then the second's."""
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

    A layer is split if the heads of its state divide evenly among the devices. The heads of the
    state share other heads, such as keys or groups. These must divide evenly among the devices too,
    or the devices among them.

    Args:
        heads_of_layer: The number of heads of the state, then the numbers of heads that they share.
            The first number is a multiple of each of the others.
    """
    num_heads, *shared = heads_of_layer
    fits = num_heads % num_devices == 0 and all(
        num % num_devices == 0 or num_devices % num == 0 for num in shared
    )
    return num_devices if fits else 1


def heads_on_each(num_heads: int, parts: int) -> int:
    """How many of `num_heads` heads each device has if a layer is split into `parts`."""
    return max(num_heads // parts, 1)
