"""`Checkpoint`: what the loader needs of the weights in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from models.loading.safetensors_reader import StoredWeight


class Checkpoint(Protocol):
    """The weights of one folder. Their names, shapes and dtypes are known before they are read."""

    folder: Path
    weights: dict[str, StoredWeight]  # by the names that weight rules have, after `rename`

    def rename(self, names: Mapping[str, str]) -> None:
        """Changes the keys of `weights`.

        Args:
            names: Name of every weight -> its new name. The new names must differ.
        """
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one weight, with bfloat16 as `ml_dtypes.bfloat16`. Several threads may read."""
        ...

    def release(self, name: str) -> None:
        """Frees the memory of a weight that was read and is not needed for now.

        The arrays that `read` returned stay valid.
        """
        ...
