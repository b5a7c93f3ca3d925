"""`TPU`: Google's."""

from dataclasses import dataclass
from typing import ClassVar

from models.platforms.base import Platform

_LANES = 128


@dataclass(frozen=True, slots=True)
class TPU(Platform):
    """Pages are lines of 128 numbers, because memory here is tiled in them.

    An array whose last axis is something else would be copied whole to be seen in another shape.
    """

    name: ClassVar[str] = "tpu"
    head_dim_step: ClassVar[int] = _LANES

    def page_shape(self, num_elements: int) -> tuple[int, ...]:
        return (num_elements // _LANES, _LANES)
