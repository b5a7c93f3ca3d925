"""`TPU`: Google's."""

from dataclasses import dataclass
from typing import ClassVar

from models.platforms.base import Platform

_LANES = 128


@dataclass(frozen=True, slots=True)
class TPU(Platform):
    """Pages are lines of 128 numbers, because TPUs store arrays in tiles of such lines.

    With another last axis, XLA would copy the whole array to change its shape.
    """

    name: ClassVar[str] = "tpu"
    head_dim_step: ClassVar[int] = _LANES

    def page_shape(self, num_elements: int) -> tuple[int, ...]:
        return (num_elements // _LANES, _LANES)
