"""Models with random weights, drawn without a program for each shape."""

from pathlib import Path

import jax
import numpy as np
import pytest

from models import LoadedModel, load_model
from models.loading import module_structure


def load_random_model(folder: Path) -> LoadedModel:
    """What `load_format="dummy"` makes in float32, except that NumPy draws the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_structure, "_random_normal", _draw)
        return load_model(folder, dtype="float32", load_format="dummy")


def _draw(_, param_idx, std, shape, dtype, sharding, order):
    assert sharding is None and order is None
    values = std * np.random.default_rng(param_idx).standard_normal(shape)
    return jax.device_put(values.astype(dtype))
