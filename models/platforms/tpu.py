"""`TPU`: Google's."""

from dataclasses import dataclass
from typing import ClassVar

from models.platforms.base import Platform


@dataclass(frozen=True, slots=True)
class TPU(Platform):
    """Nothing but its name differs so far."""

    name: ClassVar[str] = "tpu"
