"""Finds biases that have no effect. Old programs for GPTQ add them to every layer."""

from collections.abc import Collection

import numpy as np

from models.loading.check_weights import READABLE_DTYPES
from models.loading.checkpoint import Checkpoint


def find_zero_biases(checkpoint: Checkpoint, wanted: Collection[str]) -> set[str]:
    """The names of biases that the model does not have and whose numbers are all zero.

    Args:
        wanted: Names of the tensors that the model needs.
    """
    return {
        name
        for name, weight in checkpoint.weights.items()
        if name.endswith(".bias")
        and name not in wanted
        and len(weight.shape) == 1
        and weight.dtype in READABLE_DTYPES
        and not np.any(checkpoint.read(name))
    }
