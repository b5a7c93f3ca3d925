"""Random checkpoints are seeded and have the documented sizes."""

import math

import numpy as np
from safetensors.numpy import load_file

from benchmarks import random_checkpoint
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


def test_shapes_have_the_documented_size() -> None:
    # Embedding, layers (attention, MLP, norms), last norm; by hand from the shapes.
    layer = 6 * 1024 * 1024 + 3 * 3072 * 1024 + 2 * 1024 + 2 * 128
    shapes = random_checkpoint._weight_shapes(MODEL_SHAPES["mid"])
    assert sum(math.prod(shape) for _, shape in shapes) == 32_768 * 1024 + 28 * layer + 1024
