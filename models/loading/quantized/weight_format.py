"""`WeightFormat`: how a quantized checkpoint stores the weight of one `Linear`."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from models.loading.quantized.packed_integers import ScaledIntegers
from models.loading.quantized.stored_parts import StoredParts


class WeightFormat(Protocol):
    """Finds the tensors of one weight by the endings of their names, and dequantizes them.

    The names are those in the files. A stack of experts in one tensor counts as one weight.

    Args:
        endings: Of all tensors of a weight. A longer ending comes before one that it ends with.
        number_endings: Of these, the endings of tensors that hold the quantized numbers.
        plain_ending: The end of the weight's name in a checkpoint that is not quantized.
    """

    endings: tuple[str, ...]
    number_endings: tuple[str, ...]
    plain_ending: str

    def skips(self, module: str) -> bool:
        """Whether config.json lists the module as one that is not quantized."""
        ...

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """Checks the dtypes and shapes of all tensors, and returns the shape of the weight.

        Raises:
            WeightMismatchError: A tensor is missing, or its dtype or shape does not fit.
        """
        ...

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """Unpacks the numbers or the bits of floats, the scales and the zero points.

        The arguments are the same as of `dequantize`.
        """
        ...

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:  # dtype[plain_shape]
        """Computes the weight in float32, and rounds it once.

        Args:
            module: As `StoredParts.module`.
            arrays: By the endings of their names.

        Raises:
            ValueError: A tensor contains numbers that it may not contain.
        """
        ...
