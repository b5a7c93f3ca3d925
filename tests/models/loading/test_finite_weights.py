"""NaNs and infinities are found wherever they are, and nothing else is taken for one."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import CheckpointError
from models.loading.finite_weights import _CHUNK, checked_finite
from models.loading.load_model import load_model
from tests.oracles.make_checkpoint import write_random_checkpoint

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_number_passes(dtype) -> None:
    # All there are of 16 bits; of wider ones those with the same upper bits, and with all ones.
    bits = np.arange(2**16, dtype=np.uint64)
    num_bits = 8 * np.dtype(dtype).itemsize
    low = num_bits - 16
    words = np.concatenate([bits << low, (bits << low) | ((1 << low) - 1)])
    numbers = words.astype(f"uint{num_bits}").view(dtype)
    with np.errstate(invalid="ignore"):
        is_finite = np.isfinite(numbers)
    finite = numbers[is_finite].reshape(2, -1)
    assert finite.size > 2**16
    assert checked_finite(finite, name="w", where="here") is finite
    for number in numbers[~is_finite][::97]:
        with pytest.raises(CheckpointError, match="here: 1 of the 3 numbers in weight 'w'"):
            checked_finite(np.array([1, number, -1], dtype), name="w", where="here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, _CHUNK - 1, _CHUNK, 2 * _CHUNK + 4])
def test_it_is_found_in_every_place(dtype, bad: float, position: int) -> None:
    weight = np.full(2 * _CHUNK + 5, -2.5, dtype)
    weight[position] = bad
    with pytest.raises(CheckpointError, match=f"1 of the {weight.size}"):
        checked_finite(weight.reshape(1, -1), name="w", where="here")


def test_empty_weights_pass() -> None:
    checked_finite(np.zeros((0, 3), np.float32), name="w", where="here")


def test_checkpoint_with_a_nan_is_refused_by_the_weights_name(tmp_path) -> None:
    folder = write_random_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_model(folder)
