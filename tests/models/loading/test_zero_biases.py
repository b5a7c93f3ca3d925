"""Biases of zeros have no effect, so a model without biases may have them in its checkpoint."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import WeightMismatchError
from models.loading.load_model import load_model
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.loading.zero_biases import find_zero_biases
from tests.oracles.make_checkpoint import write_random_checkpoint

UP = "model.layers.0.mlp.up_proj.bias"
DOWN = "model.layers.0.mlp.down_proj.bias"


def test_only_vectors_of_zeros_that_the_model_lacks_are_found(tmp_path):
    zeros = np.zeros(4, np.float16)
    tensors = {
        "a.bias": zeros,
        "wanted.bias": zeros,
        "a.weight": zeros,
        "nan.bias": np.array([0, np.nan], np.float32),
        "small.bias": np.array([0, 1e-30], np.float32),
        "mask.bias": np.zeros((2, 2), np.float32),
        "integers.bias": np.zeros(4, np.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = find_zero_biases(SafetensorsCheckpoint(tmp_path), ["wanted.bias"])
    assert found == {"a.bias"}


def test_model_without_biases_loads(tmp_path):
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    wanted = load_model(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {UP: np.zeros(96, np.float16), DOWN: np.zeros(64, np.float16)}, path)
    assert load_model(folder).param_names == wanted.param_names
    save_file(weights | {UP: np.zeros(96, np.float16), DOWN: np.ones(64, np.float16)}, path)
    with pytest.raises(WeightMismatchError, match=rf"1 unexpected: {DOWN}\."):
        load_model(folder)
