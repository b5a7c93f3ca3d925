"""Random checkpoints have every weight that the model reads, and no other."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_checkpoint import MODEL_SHAPES, AnyShape, write_checkpoint
from models import load_model

DENSE = MODEL_SHAPES["tiny"]
SMALLER = {"num_layers": 2, "vocab_size": 256, "moe_intermediate_size": 16}
SMALLER_HYBRID = {"num_layers": 4, "vocab_size": 256, "intermediate_size": 16}
SHAPES = {
    "dense": DENSE,
    "experts": dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2),
    "latents": dataclasses.replace(MODEL_SHAPES["small-latent"], **SMALLER),
    "delta net": dataclasses.replace(MODEL_SHAPES["small-gdn"], **SMALLER_HYBRID),
    "mamba2": dataclasses.replace(MODEL_SHAPES["small-mamba2"], **SMALLER_HYBRID),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_weight_of_the_checkpoint_is_loaded(shape: AnyShape, tmp_path: Path) -> None:
    # Raises if a weight is missing, or if the model does not know one.
    model = load_model(write_checkpoint(tmp_path, shape), dtype="float32")
    assert model.config.num_layers == shape.num_layers
    for name, param in zip(model.param_names, model.params, strict=True):
        assert np.isfinite(param).all() and np.any(param), name
