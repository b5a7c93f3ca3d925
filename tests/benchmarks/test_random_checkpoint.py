"""Random checkpoints are seeded, and both libraries read the same model from them."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint

TINY = MODEL_SHAPES["tiny"]


def test_seed_decides_the_weights(tmp_path) -> None:
    first, same, other = (
        load_file(write_checkpoint(tmp_path / str(i), TINY, seed=seed) / "model.safetensors")
        for i, seed in enumerate((5, 5, 6))
    )
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(first[name], same[name])
    assert not np.array_equal(first[name], other[name])


@pytest.mark.parametrize(
    ("name", "num_weights"),
    # Embedding, layers (attention, MLP, norms), last norm; by hand from the shapes.
    [
        ("small", 16_384 * 512 + 8 * (1536 * 512 + 3 * 1536 * 512 + 2 * 512 + 2 * 64) + 512),
        (
            "mid",
            32_768 * 1024 + 28 * (6 * 1024 * 1024 + 3 * 3072 * 1024 + 2 * 1024 + 2 * 128) + 1024,
        ),
    ],
)
def test_shapes_have_the_wanted_size(name: str, num_weights: int) -> None:
    assert MODEL_SHAPES[name].num_weights == num_weights
